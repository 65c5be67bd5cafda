"""The checks, one file per question, in order of accusation. A check reads evidence and never runs a model."""

from __future__ import annotations

from types import ModuleType

from day0check.checks import candidate, choose, compute, exact, logits, move, propagated
from day0check.checks.evidence import Answer, Evidence, answer, read_evidence
from day0check.types import RunCase

CHECKS: dict[str, ModuleType] = {
    "candidate": candidate,
    "exact": exact,
    "move": move,
    "choose": choose,
    "compute": compute,
    "propagated": propagated,
    "logits": logits,
}
_OPERATOR_CHECKS = ("candidate", "exact", "move", "choose", "compute")

__all__ = ["CHECKS", "Answer", "Evidence", "checks_of", "judge_case", "read_evidence"]


def checks_of(case: RunCase) -> tuple[str, ...]:
    """Names of the checks of a case: those that its kind needs (a case of operators has no net), then its own."""
    always = _OPERATOR_CHECKS if case.id.startswith("operators/") else tuple(CHECKS)
    return tuple(dict.fromkeys((*always, *case.checks)))


def judge_case(evidence: Evidence) -> tuple[Answer, ...]:
    """The answers of all checks of the case, in order of accusation; one that does not exist is not run, and named."""
    return tuple(
        CHECKS[name].judge(evidence)
        if name in CHECKS
        else answer(name, evidence, "not_run", "there is no check of this name")
        for name in checks_of(evidence.case)
    )
