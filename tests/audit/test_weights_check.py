"""The check `weights`: how findings of an audit become an answer, and where they stand among other faults."""

import pytest

from day0check.checks.weights import NAME, judge_audit
from day0check.compare.locate import first_fault
from day0check.types import Finding


def found(severity="blocker", check=NAME, **more):
    return Finding(id="0" * 12, severity=severity, check=check, operator=None, message=check, **more)


@pytest.mark.parametrize(
    ("severities", "status", "words"),
    [
        ((), "passed", "9 tensors in 2 files"),
        (("warning", "note", "note"), "passed", "9 tensors in 2 files: 1 warning, 2 notes"),
        (("blocker", "note"), "failed", "9 tensors in 2 files: 1 blocker, 1 note"),
    ],
)
def test_only_a_blocker_fails(severities, status, words):
    """Catches an unknown key that fails a run, and a blocker that does not."""
    answer = judge_audit([found(s) for s in severities], tensors=9, files=2)
    assert (answer.outcome.name, answer.outcome.case) == ("weights", "")
    assert (answer.outcome.status, answer.outcome.summary) == (status, words)
    assert len(answer.findings) == len(severities)


def test_a_fault_of_the_checkpoint_is_the_first_to_repair():
    """Catches a report that sends its reader to an operator that was given other weights."""
    operator = found(check="compute", evidence={"order": 0})
    assert first_fault([operator, found()]).check == NAME
    assert first_fault([operator, found("warning")]).check == "compute"
