"""Both workers on the preset tiny: the reference follows the candidate, and its own death is not the candidate's."""

import contextlib

import psutil
import pytest

from day0check.runner import Progress, RunPlan, run
from day0check.snapshot import Snapshot, case_directory, read_measures
from day0check.types import Request, RunCase, Turn
from reference.presets import preset_dir

pytestmark = pytest.mark.timeout(200)


def case(name: str, prompt: int) -> RunCase:
    tokens = tuple(33 + (7 * i) % 90 for i in range(prompt))
    return RunCase(name, (Request(f"{name}/a#1", (Turn(tokens),), 2),))


def plan(tmp_path, *cases: RunCase) -> RunPlan:
    return RunPlan(cases, tmp_path / "out", model_dir=str(preset_dir("tiny")), backend="reference")


def test_every_finished_case_is_compared_and_the_truth_is_green(tmp_path):
    """Catches a comparison that is skipped, and an alarm about the reference itself."""
    told: list[Progress] = []
    results = run(plan(tmp_path, case("text/a", 9), case("text/b", 5)), told.append)
    for result in results:
        assert (result.candidate.status, result.candidate.message) == ("finished", "")
        assert result.reference is not None
        assert (result.reference.status, result.reference.message) == ("finished", "")
        assert result.candidate.repeat_equal is True
        assert result.candidate.links["checked"] > 100
        assert result.candidate.links["changed"] == 0
        local = Snapshot(result.directory / "candidate").measures
        net = read_measures(result.directory / "reference" / "net.jsonl", [])
        assert local
        assert net
        assert [m.tap for m in (*local, *net) if not m.passed] == []
    assert [(p.case, p.what) for p in told if p.role == "reference"] == [
        (name, what) for name in ("text/a", "text/b") for what in ("begin", "end")
    ]
    assert max(p.done for p in told if p.role == "candidate") == 2


def test_a_comparison_that_dies_is_recorded_and_the_next_one_goes_on(tmp_path):
    """Catches a missing comparison that looks like a passed one, and a candidate that is blamed for it."""

    def kill_first(p: Progress) -> None:
        if (p.role, p.what, p.case) == ("reference", "begin", "text/a"):
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):  # one that has ended has no command line
                    if any("reference-0.json" in part for part in child.cmdline()):
                        child.kill()

    first, second = run(plan(tmp_path, case("text/a", 5), case("text/b", 4)), kill_first)
    assert (first.candidate.status, second.candidate.status) == ("finished", "finished")
    assert first.reference.status == "aborted"
    assert "SIGKILL" in first.reference.message
    assert not (case_directory(tmp_path / "out", "text/a", "reference") / "net.jsonl").exists()
    assert second.reference.status == "finished"
