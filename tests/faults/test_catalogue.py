"""Guards the catalogue of faults and the self-test that runs it."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import random
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import day0check
from day0check.case import load_cases
from day0check.cli.app import cli
from day0check.cli.selftest import line, summary
from day0check.contracts import CONTRACTS
from day0check.errors import Day0Error, ExitCode, NothingSelected, UsageError
from day0check.faults.catalogue import ROOT, catalogue, locate, select
from day0check.faults.entry import KINDS, PLACES, Address, Entry
from day0check.selftest import Outcome, counts, exit_code, from_verdict, run
from day0check.types import Finding, Verdict
from reference.presets import preset

PACKAGE = Path(day0check.__file__).parent
SAMPLE = {"public": 2, "further": 1, "benign": 1}
PLACED_SHARE = 0.95


@pytest.mark.parametrize("located", catalogue(), ids=lambda located: located.entry.id)
def test_an_entry_is_whole(located):
    """Catches an entry with an address that cannot be: an unknown operator, a layer that the model does not have."""
    entry, folder = located.entry, located.file.parent.name
    letter, number = entry.id.split("-")
    assert letter == {"public": "S", "further": "F", "benign": "B"}[folder]
    assert located.file.name.startswith(f"{letter.lower()}{number}_")
    assert entry.kind in KINDS
    assert entry.title
    assert entry.visible
    assert bool(entry.source) == (folder == "public")
    assert entry.benign == (folder == "benign")
    config = preset(entry.model).config()
    assert load_cases((located.case,), config=config, model=entry.model)
    if not entry.benign:
        assert entry.expected.operator in (*CONTRACTS, *PLACES)
        assert entry.expected.layer is None or 0 <= entry.expected.layer < len(config.every_layer)


def test_nobody_who_judges_knows_an_entry():
    """Catches a check, a comparison or a gate that was taught the catalogue by name."""
    known = re.compile(r"day0check\.faults|day0check/faults|\b[SFB]-\d\d\b")
    rooms = ("accelerated", "backends", "checks", "compare", "contracts", "probe", "runner.py", "worker", "gate.py")
    files = [f for room in rooms for f in ((PACKAGE / room).rglob("*.py") if room[-3:] != ".py" else [PACKAGE / room])]
    assert len(files) > 50
    for file in (*files, *(ROOT.parent.parent / "reference").rglob("*.py")):
        code = [text for text in file.read_text(encoding="utf-8").splitlines() if known.search(text)]
        assert not code, f"{file}: {code[0]}"


def test_selection_by_id_and_kind():
    """Catches a misspelt id or kind that silently selects everything, or nothing."""
    assert [located.entry.id for located in select(("S-38", "S-01"))] == ["S-38", "S-01"]
    assert {located.entry.kind for located in select(kinds=("rope",))} == {"rope"}
    with pytest.raises(UsageError, match="no fault 'S-3'"):
        select(("S-3",))
    with pytest.raises(UsageError, match="no kind 'ropes'"):
        select(kinds=("ropes",))
    with pytest.raises(NothingSelected):
        select(("S-38",), ("rope",))


@pytest.mark.parametrize(
    ("text", "message"),
    [("x = 1\n", "says nothing about itself"), ("from day0check.faults.entry import *\n{entry}", "changes nothing")],
)
def test_a_file_that_is_no_entry_is_refused(tmp_path, text, message):
    """Catches an entry that was forgotten half-way: it would count as a fault that is never laid over."""
    entry = 'ENTRY = Entry("S-99", "t", "rope", "v", Address("rope.apply", 0, "prefill"))\n'
    file = tmp_path / "s99_empty.py"
    file.write_text(text.format(entry=entry))
    with pytest.raises(Day0Error, match=message):
        locate(file)


def finding(**changed) -> Finding:
    fields = {"layer": 3, "phase": "prefill", "request": "faults/batch/b#1", "position": 7} | changed
    return Finding("0" * 12, "blocker", "compute", fields.pop("operator", "dsa.score"), "wrong", **fields)


def test_an_address_names_exactly_one_place():
    """Catches an address that is content with a neighbour: another layer, phase, request or position."""
    address = Address("dsa.score", 3, "prefill", request="b", position=7)
    assert address.names(finding())
    for wrong in ({"layer": 2}, {"phase": "decode"}, {"operator": "dsa.select"}, {"position": 8}, {"request": None}):
        assert not address.names(finding(**wrong)), wrong
    assert not address.names(finding(request="faults/batch/bb#1"))
    assert not address.names(None)
    assert Address("dsa.score", 3, "prefill").names(finding(position=None))


def verdict(status: str, first: Finding | None) -> Verdict:
    return Verdict(status, {}, "bf16", ("faults/short",), first_fault=first)


def test_what_counts_as_caught_and_as_an_alarm():
    """Catches a self-test that is content with an inconclusive verdict, for a fault or for a legal variant."""
    fault = Entry("S-99", "t", "index", "v", Address("dsa.score", 3, "prefill"))
    legal = Entry("B-99", "t", "index", "v", None)
    placed = from_verdict(fault, verdict("not_ready", finding()), 1.0)
    elsewhere = from_verdict(fault, verdict("not_ready", finding(layer=5)), 1.0)
    missed = [from_verdict(fault, verdict(status, None), 1.0) for status in ("ready", "inconclusive", "error")]
    quiet = from_verdict(legal, verdict("ready", None), 1.0)
    alarms = [from_verdict(legal, verdict(status, finding()), 1.0) for status in ("not_ready", "inconclusive")]
    assert (placed.caught, placed.placed) == (True, True)
    assert (elsewhere.caught, elsewhere.placed) == (True, False)
    assert not any(o.caught or o.good for o in missed)
    assert quiet.good
    assert not any(o.good for o in alarms)
    own = from_verdict(dataclasses.replace(fault, id="F-99"), verdict("not_ready", finding()), 1.0)
    assert counts([placed, elsewhere, *missed, own, quiet, *alarms]) == {
        "faults": 5,
        "caught": 2,
        "placed": 1,
        "further": 1,
        "further_caught": 1,
        "further_placed": 1,
        "legal": 3,
        "false_alarms": 2,
    }
    assert exit_code([placed, elsewhere, quiet]) == ExitCode.READY
    for bad in (*missed, *alarms):
        assert exit_code([placed, bad, quiet]) == ExitCode.NOT_READY
    assert exit_code([]) == ExitCode.NOT_READY
    assert "MISPLACED" in line(elsewhere)
    assert "MISSED (inconclusive)" in line(missed[1])
    told = summary(counts([placed, elsewhere, *missed, own, quiet, *alarms]))
    assert "2 of 5 public faults caught, 1 placed exactly; 1 of 1 further ones caught, 1 placed; 2 of 3" in told


ABORTS = """
import os
import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry("S-99", "aborts", "memory", "always", Address("embed.tokens", None, "prefill"))


@day0check.operator.wrap("embed.tokens")
def embed(inner, ids, **kwargs):
    os.abort()
"""


def test_an_entry_that_kills_its_process_loses_itself_alone(tmp_path):
    """Catches a self-test that stops at the first crash, or that takes a crash for a fault that was caught."""
    file = tmp_path / "s99_aborts.py"
    file.write_text(ABORTS)
    told: list[Outcome] = []
    first, second = run((locate(file), *select(("F-19",))), tmp_path / "out", tell=told.append)
    assert (first.id, first.status, first.caught) == ("S-99", "crashed", False)
    assert "code" in first.message
    assert (second.id, second.status, second.placed) == ("F-19", "not_ready", True)
    assert told == [first, second]


def test_run_with_a_fault_of_the_catalogue(tmp_path):
    """Catches a `run --fault` that does not lay the fault over, or that hides what else was asked."""
    both = CliRunner().invoke(cli, ["run", "--fault", "S-15", "--ops", "x.py"])
    assert both.exit_code == 2
    assert "exclude each other" in both.stderr
    unknown = CliRunner().invoke(cli, ["run", "--fault", "S-151"])
    assert unknown.exit_code == 2
    assert "did you mean" in unknown.stderr
    ended = CliRunner().invoke(cli, ["run", "--fault", "S-15", "--out", str(tmp_path / "out"), "--json"])
    assert ended.exit_code == 1
    assert json.loads(ended.stdout)["first_fault"]["operator"] == "mla.merge"


def sample() -> list[str]:
    """A few entries of each folder, others every day; DAY0CHECK_SAMPLE_SEED repeats a day's choice."""
    seed = os.environ.get("DAY0CHECK_SAMPLE_SEED", datetime.date.today().isoformat())
    draw, chosen = random.Random(seed), []
    for folder, count in SAMPLE.items():
        mine = [located.entry.id for located in catalogue() if located.file.parent.name == folder]
        chosen += draw.sample(mine, count)
    return chosen


def test_a_sample_of_the_catalogue(tmp_path):
    """Catches a change that lets a known fault through, or that cries wolf at a legal variant."""
    outcomes = run(select(sample()), tmp_path / "out")
    wrong = [line(outcome) for outcome in outcomes if not outcome.good]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_whole_catalogue(tmp_path):
    """Catches the same among all of them, and an address that moved."""
    outcomes = run(catalogue(), tmp_path / "out", jobs=2)
    wrong = [line(outcome) for outcome in outcomes if not outcome.good]
    assert not wrong, "\n".join(wrong)
    count = counts(outcomes)
    misplaced = [line(outcome) for outcome in outcomes if outcome.caught and not outcome.placed and not outcome.further]
    assert count["placed"] >= PLACED_SHARE * count["faults"], "\n".join(misplaced)
