"""What a run must have exercised as a whole: an operator that was replaced and never judged proves nothing."""

from __future__ import annotations

from collections.abc import Sequence

from day0check.checks.evidence import Answer, Evidence
from day0check.types import CheckOutcome

QUESTION = "Was every operator that the operators file replaces judged in at least one case?"
NAME = "coverage"


def judge_run(evidence: Sequence[Evidence]) -> Answer | None:
    """The answer over all cases of a run; None when no operator was replaced. Layouts and prepared weights are named
    like operators, and those are judged through the operators that use them."""
    replaced = sorted({name for e in evidence for name in e.run.get("replaced", ()) if "." in name})
    if not replaced:
        return None
    judged = {m.operator for e in evidence for m in e.measures if not m.not_judged}
    never = [name for name in replaced if name not in judged]
    if never:
        summary = f"{', '.join(never)}: replaced, but judged in no case of this run"
        return Answer(CheckOutcome(NAME, "not_run", "", summary))
    return Answer(
        CheckOutcome(NAME, "passed", "", f"{len(replaced)} of {len(replaced)} replaced operators were judged")
    )
