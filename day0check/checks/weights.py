"""The checkpoint itself, before anything runs on it: weights that are not the model's make every answer another's."""

from __future__ import annotations

from collections.abc import Sequence

from day0check.checks.evidence import Answer
from day0check.types import CheckOutcome, Finding

QUESTION = "Is the checkpoint whole, unambiguous, and what its configuration says?"
NAME = "weights"


def judge_audit(findings: Sequence[Finding], *, tensors: int, files: int) -> Answer:
    """The answer on an audit of `tensors` tensors in `files` files: failed when a finding is a blocker."""
    counts = {severity: sum(f.severity == severity for f in findings) for severity in ("blocker", "warning", "note")}
    told = ", ".join(f"{n} {severity}{'s' if n > 1 else ''}" for severity, n in counts.items() if n)
    summary = f"{tensors} tensors in {files} files" + (f": {told}" if told else "")
    status = "failed" if counts["blocker"] else "passed"
    return Answer(CheckOutcome(NAME, status, "", summary), tuple(findings))
