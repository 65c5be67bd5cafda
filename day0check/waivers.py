"""Waivers: findings that are known, owned and accepted until a date. Read from `waivers.toml`:

    [[waiver]]
    finding = "3f9a0c12d4e5"            # the id in verdict.json
    reason = "vendor ticket open; select is right from driver 571 on"
    owner = "kernels@example.org"
    link = "https://example.org/issues/12"
    expires = 2027-01-31                # at most 90 days ahead
    ceiling = 3.0                       # optional: the largest `value` that is still the known finding

A waiver never widens a limit: the finding stays in the report, marked as waived.
"""

from __future__ import annotations

import datetime
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from day0check.errors import InputError
from day0check.types import Finding, finding_id

CHECK = "waivers"
LONGEST_DAYS = 90
_REQUIRED = ("finding", "reason", "owner", "link", "expires")
_NON_FINITE = frozenset({"nan", "inf", "non-finite", "nonfinite", "not finite"})
_ISOLATION = frozenset({"isolation"})


@dataclass(frozen=True)
class Waiver:
    finding: str
    reason: str
    owner: str
    link: str
    expires: datetime.date
    ceiling: float | None = None


def read_waivers(path: Path, *, today: datetime.date) -> tuple[Waiver, ...]:
    """The waivers of a file. An expired one is kept: applying it gives the finding that says so.

    Raises InputError with file and key for anything that is not a waiver, or that expires in more than 90 days.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("there is no such file", where=str(path), todo="give the path of a waivers.toml") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as cause:
        raise InputError(f"not readable as TOML: {cause}", where=str(path)) from cause
    for key in data:
        if key != "waiver":
            raise InputError(
                f"unknown key {key!r}", where=str(path), todo="a waivers file holds [[waiver]] tables only"
            )
    entries = data.get("waiver", [])
    if not isinstance(entries, list):
        raise InputError("`waiver` must be an array of tables", where=str(path), todo="write [[waiver]]")
    waivers = tuple(_read(entry, where=f"{path}: waiver[{i}]", today=today) for i, entry in enumerate(entries))
    seen: set[str] = set()
    for waiver in waivers:
        if waiver.finding in seen:
            raise InputError(f"finding {waiver.finding} is waived twice", where=str(path), todo="keep one of them")
        seen.add(waiver.finding)
    return waivers


def _read(entry: object, *, where: str, today: datetime.date) -> Waiver:
    if not isinstance(entry, dict):
        raise InputError("a table is needed", where=where)
    unknown = sorted(set(entry) - set(_REQUIRED) - {"ceiling"})
    if unknown:
        raise InputError(f"unknown key {unknown[0]!r}", where=where, todo=f"known: {', '.join(_REQUIRED)}, ceiling")
    for key in _REQUIRED:
        if key not in entry:
            raise InputError(f"key {key!r} is missing", where=where, todo="every waiver states it")
        value = entry[key]
        if key == "expires":
            if not isinstance(value, datetime.date) or isinstance(value, datetime.datetime):
                raise InputError(f"must be a date, not {value!r}", where=f"{where}.expires", todo="write 2027-01-31")
        elif not isinstance(value, str) or not value.strip():
            raise InputError("must be a text that is not empty", where=f"{where}.{key}")
    days = (entry["expires"] - today).days
    if days > LONGEST_DAYS:
        raise InputError(
            f"{entry['expires']} is {days} days ahead", where=f"{where}.expires", todo=f"at most {LONGEST_DAYS} days"
        )
    ceiling = entry.get("ceiling")
    if ceiling is not None:
        if isinstance(ceiling, bool) or not isinstance(ceiling, (int, float)) or not math.isfinite(ceiling):
            raise InputError(f"must be a finite number, not {ceiling!r}", where=f"{where}.ceiling")
        ceiling = float(ceiling)
    return Waiver(*(entry[key] for key in _REQUIRED), ceiling=ceiling)


def apply_waivers(
    findings: Sequence[Finding], waivers: Sequence[Waiver], *, today: datetime.date, partial: bool = False
) -> tuple[Finding, ...]:
    """The findings with `waived` set where a valid waiver holds, and a blocker of check `waivers` for every waiver that
    is expired, exceeded, unmatched or waives what cannot be waived. In a `partial` run (chosen cases) an unmatched
    waiver is a note: its finding may live in a case that was not chosen.
    """
    by_id = {w.finding: w for w in waivers}
    problems: list[Finding] = []
    kept: list[Finding] = []
    refused: set[tuple[str, str]] = set()
    for finding in findings:
        waiver = by_id.get(finding.id)
        refusal = _refusal(finding, waiver, today) if waiver else None
        if waiver and refusal is None:
            finding = replace(finding, waived=True)
        elif waiver and refusal and (waiver.finding, refusal[0]) not in refused:
            refused.add((waiver.finding, refusal[0]))
            problems.append(_problem(waiver, *refusal))
        kept.append(finding)
    present = {f.id for f in findings}
    for waiver in waivers:
        if waiver.finding not in present:
            word, text = (
                "unmatched",
                f"the waiver of finding {waiver.finding} ({waiver.owner}) matches nothing: remove it",
            )
            if waiver.expires < today:
                word, text = (
                    "expired",
                    f"the waiver of finding {waiver.finding} ({waiver.owner}) expired on {waiver.expires}",
                )
            problem = _problem(waiver, word, text)
            problems.append(replace(problem, severity="note") if partial and word == "unmatched" else problem)
    return (*kept, *problems)


def cannot_be_waived(finding: Finding) -> str:
    """Why this finding admits no waiver, or an empty text."""
    if finding.stack_layer == "harness":
        return "it is a fault of the harness"
    pattern = str(finding.evidence.get("pattern", "")).lower()
    values = [finding.value, *_numbers(finding.evidence)]
    if any(word in pattern for word in _NON_FINITE) or any(v is not None and not math.isfinite(v) for v in values):
        return "it is about values that are not finite"
    if finding.check in _ISOLATION or "isolation" in pattern:
        return "it is about isolation between requests"
    return ""


def _numbers(evidence: dict[str, object]) -> list[float]:
    statistics = evidence.get("statistics")
    values = statistics.values() if isinstance(statistics, dict) else ()
    return [float(v.replace("Infinity", "inf")) if isinstance(v, str) else v for v in values if _is_number(v)]


def _is_number(value: object) -> bool:
    return value in ("NaN", "Infinity", "-Infinity") or (
        isinstance(value, (int, float)) and not isinstance(value, bool)
    )


def _refusal(finding: Finding, waiver: Waiver, today: datetime.date) -> tuple[str, str] | None:
    head = f"the waiver of finding {waiver.finding} ({waiver.owner})"
    reason = cannot_be_waived(finding)
    if reason:
        return "not allowed", f"{head} does not count: {reason}, which cannot be waived"
    if waiver.expires < today:
        return "expired", f"{head} expired on {waiver.expires}"
    if waiver.ceiling is not None:
        if finding.value is None:
            return "exceeded", f"{head} has a ceiling, but the finding has no value to hold under it"
        if finding.value > waiver.ceiling:
            return "exceeded", f"{head} allows up to {waiver.ceiling:.6g}; the finding has {finding.value:.6g}"
    return None


def _problem(waiver: Waiver, word: str, message: str) -> Finding:
    return Finding(
        id=finding_id(CHECK, None, waiver.finding, None, word),
        severity="blocker",
        check=CHECK,
        operator=None,
        message=message,
        stack_layer="framework",
        evidence={"pattern": word, "finding": waiver.finding, "owner": waiver.owner, "link": waiver.link},
    )
