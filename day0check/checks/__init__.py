"""The checks, one file per question, in order of accusation. A check reads evidence and never runs a model."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from day0check.checks import (
    candidate,
    choose,
    compute,
    coverage,
    exact,
    logits,
    move,
    parameters,
    propagated,
    repeat,
    weights,
)
from day0check.checks.evidence import Answer, Evidence, answer, read_evidence
from day0check.types import RunCase

CHECKS: dict[str, ModuleType] = {
    "candidate": candidate,
    "parameters": parameters,
    "exact": exact,
    "move": move,
    "choose": choose,
    "compute": compute,
    "propagated": propagated,
    "logits": logits,
    "repeat": repeat,
}
MODEL_CHECKS: dict[str, ModuleType] = {"weights": weights}  # asked of the checkpoint, before anything runs on it
RUN_CHECKS: dict[str, ModuleType] = {"coverage": coverage}  # asked once, about all cases of a run together
_OPERATOR_CHECKS = ("candidate", "exact", "move", "choose", "compute")

__all__ = [
    "CHECKS",
    "MODEL_CHECKS",
    "RUN_CHECKS",
    "Answer",
    "Evidence",
    "checks_of",
    "judge_case",
    "judge_run",
    "read_evidence",
]


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


def judge_run(evidence: Sequence[Evidence]) -> tuple[Answer, ...]:
    """The answers of the checks on a whole run; a check that has nothing to ask of this run gives none."""
    answers = (check.judge_run(evidence) for check in RUN_CHECKS.values())
    return tuple(a for a in answers if a is not None)
