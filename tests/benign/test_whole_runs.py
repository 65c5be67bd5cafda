"""Guards the sweep of whole runs: what it covers, that it can fail, and that it goes on where it was stopped."""

import dataclasses
import json

from benign import whole_runs
from benign.counting import read_lines
from benign.legal_variants import TINY
from benign.whole_runs import CASES, grid, run_number

from day0check.contracts.profiles import PROFILES

RUNS = 200


def test_two_hundred_runs_reach_every_preset_case_and_profile():
    """Catches a sweep that counts the same few combinations again and again, or leaves out a profile."""
    chosen = [run_number(n) for n in range(RUNS)]
    assert len(set(chosen)) == RUNS
    assert {run.model for run in chosen} == set(TINY)
    assert {run.case for run in chosen} == set(CASES)
    assert {run.profile for run in chosen} == set(PROFILES)
    assert run_number(len(grid())).model == grid()[0].model + "@1"


def test_what_is_not_ready_is_an_alarm_and_is_not_run_again(tmp_path, monkeypatch):
    """Catches a sweep that takes an inconclusive verdict for a good one, forgets an alarm, or repeats what is done."""
    ran = []

    def fake(run):
        ran.append(run)
        status = ("ready", "inconclusive")[len(ran) == 2]
        code = (0, 4)[len(ran) == 2]
        return {**dataclasses.asdict(run), "code": code, "status": status, "seconds": 1.0, "said": ""}

    monkeypatch.setattr(whole_runs, "ended", fake)
    state = tmp_path / "runs.jsonl"
    assert whole_runs.main(["--runs", "3", "--state", str(state)]) == 1
    assert whole_runs.main(["--runs", "4", "--state", str(state)]) == 1
    assert ran == [run_number(n) for n in range(4)]
    assert "1 of 4 whole runs not ready" in whole_runs.table(state)
    assert [line["code"] for line in read_lines(state)] == [0, 4, 0, 0]


def test_a_run_is_the_command_and_its_verdict(tmp_path, monkeypatch):
    """Catches a line that says ready without a verdict: a command that ends with 0 and writes none, or dies."""

    class Process:
        returncode, stderr = 0, "said something"

    def command(arguments, **_):
        if "text/code" in arguments:
            folder = whole_runs.Path(arguments[arguments.index("--out") + 1])
            folder.mkdir()
            (folder / "verdict.json").write_text(json.dumps({"status": "ready"}))
        return Process

    monkeypatch.setattr(whole_runs.subprocess, "run", command)
    written = whole_runs.ended(whole_runs.WholeRun("tiny", "text/code", "bf16"))
    without = whole_runs.ended(whole_runs.WholeRun("tiny", "text/one_turn", "bf16"))
    assert not whole_runs.is_alarm(written)
    assert whole_runs.is_alarm(without)
    assert without["said"] == "said something"
