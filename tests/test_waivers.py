"""Waivers: what they hold back, for how long, and what they never do."""

from __future__ import annotations

import datetime
import math
from pathlib import Path

import pytest

from day0check.errors import InputError
from day0check.gate import Scene, decide
from day0check.types import CheckOutcome, Finding, finding_id
from day0check.waivers import Waiver, apply_waivers, read_waivers

TODAY = datetime.date(2026, 11, 30)
ID = finding_id("compute", "norm.rms", "dsa+moe", "prefill", "one row")
SCENE = Scene(model={"name": "tiny"}, profile="bf16", cases=("text/a",))
ENTRY = """
[[waiver]]
finding = "{finding}"
reason = "vendor ticket open"
owner = "kernels@example.org"
link = "https://example.org/12"
expires = {expires}
{more}
"""


def found(**changes) -> Finding:
    fields = {"id": ID, "severity": "blocker", "check": "compute", "operator": "norm.rms", "message": "x", "value": 1.3}
    return Finding(**{**fields, "evidence": {"case": "text/a", "pattern": "one row"}, **changes})


def waiver(**changes) -> Waiver:
    fields = {"finding": ID, "reason": "r", "owner": "o", "link": "l", "expires": TODAY}
    return Waiver(**{**fields, **changes})


def verdict(finding: Finding, *waivers: Waiver, partial: bool = False):
    scene = Scene(**{**SCENE.__dict__, "partial": partial})
    outcomes = (CheckOutcome("compute", "failed", "text/a", "1 failed"),)
    return decide(outcomes, (finding,), scene, waivers=waivers, today=TODAY)


def test_a_waived_finding_stays_in_sight_and_does_not_fail() -> None:
    """Would catch a waiver that hides the finding, or one that has no effect; the last day still counts."""
    result = verdict(found(), waiver())
    assert result.status == "ready"
    assert [f.waived for f in result.findings] == [True]
    assert result.first_fault is None


@pytest.mark.parametrize(
    ("finding", "held", "pattern"),
    [
        (found(), waiver(expires=TODAY - datetime.timedelta(days=1)), "expired"),
        (found(), waiver(ceiling=1.2), "exceeded"),
        (found(value=None), waiver(ceiling=1.2), "exceeded"),
        (found(value=math.nan), waiver(), "not allowed"),
        (found(evidence={"pattern": "NaN in one row"}), waiver(), "not allowed"),
        (found(evidence={"pattern": "x", "statistics": {"non_finite": "Infinity"}}), waiver(), "not allowed"),
        (found(stack_layer="harness"), waiver(), "not allowed"),
        (found(check="isolation"), waiver(), "not allowed"),
        (found(), waiver(finding="0" * 12), "unmatched"),
    ],
)
def test_a_waiver_that_does_not_hold_fails(finding: Finding, held: Waiver, pattern: str) -> None:
    """Would catch an expired, exceeded, unmatched or forbidden waiver that lets a run pass."""
    result = verdict(finding, held)
    assert result.status in ("not_ready", "error")
    assert [f.evidence["pattern"] for f in result.findings if f.check == "waivers"] == [pattern]
    assert not any(f.waived for f in result.findings)


def test_a_ceiling_that_is_kept() -> None:
    """Would catch a ceiling read the wrong way round."""
    assert verdict(found(value=1.2), waiver(ceiling=1.2)).status == "ready"


def test_one_waiver_too_many_only_notes_in_a_chosen_selection() -> None:
    """Would catch a run of one case that fails for a waiver of another one."""
    kept = apply_waivers((), (waiver(),), today=TODAY, partial=True)
    assert [f.severity for f in kept] == ["note"]
    assert [f.severity for f in apply_waivers((), (waiver(),), today=TODAY)] == ["blocker"]


def write(tmp_path: Path, expires: str = "2027-01-31", more: str = "", finding: str = ID) -> Path:
    path = tmp_path / "waivers.toml"
    path.write_text(ENTRY.format(finding=finding, expires=expires, more=more))
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
    """Would catch a key that is lost."""
    (read,) = read_waivers(write(tmp_path, more="ceiling = 3"), today=TODAY)
    expires = datetime.date(2027, 1, 31)
    assert read == Waiver(ID, "vendor ticket open", "kernels@example.org", "https://example.org/12", expires, 3.0)


def test_ninety_days_are_the_most(tmp_path: Path) -> None:
    """Would catch an off-by-one in the longest time."""
    assert read_waivers(write(tmp_path, expires="2027-02-28"), today=TODAY)
    with pytest.raises(InputError, match="91 days"):
        read_waivers(write(tmp_path, expires="2027-03-01"), today=TODAY)


@pytest.mark.parametrize(
    ("expires", "more", "words"),
    [
        ('"soon"', "", "must be a date"),
        ("2027-01-01T00:00:00", "", "must be a date"),
        ("2027-01-01", 'for = "ever"', "unknown key 'for'"),
        ("2027-01-01", "ceiling = nan", "finite"),
        ("2027-01-01", "ceiling = true", "finite"),
        ("2027-01-01\n[more]", "", "unknown key 'more'"),
        ("", "", "TOML"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, expires: str, more: str, words: str) -> None:
    """Would catch a waiver without a date, a misspelt key, or a ceiling that holds nothing."""
    with pytest.raises(InputError, match=words) as caught:
        read_waivers(write(tmp_path, expires=expires, more=more), today=TODAY)
    assert "waivers.toml" in str(caught.value)


def test_a_missing_key_and_a_twin(tmp_path: Path) -> None:
    """Would catch a waiver without an owner, and two that contradict each other."""
    path = write(tmp_path)
    path.write_text(path.read_text().replace('owner = "kernels@example.org"\n', ""))
    with pytest.raises(InputError, match="'owner' is missing"):
        read_waivers(path, today=TODAY)
    path.write_text(write(tmp_path).read_text() * 2)
    with pytest.raises(InputError, match="twice"):
        read_waivers(path, today=TODAY)
    with pytest.raises(InputError, match="no such file"):
        read_waivers(tmp_path / "absent.toml", today=TODAY)
