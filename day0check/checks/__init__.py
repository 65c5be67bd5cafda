"""The checks, one file per question, in order of accusation. A check reads evidence and never runs a model."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from day0check.checks import (
    candidate,
    capture,
    choose,
    compute,
    cost,
    coverage,
    exact,
    logits,
    move,
    parameters,
    profile,
    propagated,
    ranks,
    repeat,
    weights,
)
from day0check.checks.evidence import Answer, Evidence, answer, read_evidence
from day0check.checks.invariants import INVARIANTS
from day0check.checks.invariants.extra_runs import ExtraRun
from day0check.types import Outputs, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

CHECKS: dict[str, ModuleType] = {
    "candidate": candidate,
    "capture": capture,
    "parameters": parameters,
    "exact": exact,
    "move": move,
    "choose": choose,
    "compute": compute,
    "propagated": propagated,
    "logits": logits,
    "repeat": repeat,
}
# asked where the [expect] of a case names them, of a measurement that the worker makes after the judged run
MEASURED: dict[str, ModuleType] = {"cost": cost}
MODEL_CHECKS: dict[str, ModuleType] = {"weights": weights}  # asked of the checkpoint, before anything runs on it
# asked once, about all cases of a run together
RUN_CHECKS: dict[str, ModuleType] = {"coverage": coverage, "profile": profile, "ranks": ranks}
_OPERATOR_CHECKS = ("candidate", "exact", "move", "choose", "compute")

__all__ = [
    "CHECKS",
    "INVARIANTS",
    "MEASURED",
    "MODEL_CHECKS",
    "RUN_CHECKS",
    "Answer",
    "Evidence",
    "checks_of",
    "extra_runs_of",
    "judge_case",
    "judge_run",
    "read_evidence",
]


def checks_of(case: RunCase, config: ModelConfig | None = None) -> tuple[str, ...]:
    """Names of the checks of a case: those that its kind needs (a case of operators has no net), then its own, less
    those that are about a part which a model of this `config` does not have."""
    always = _OPERATOR_CHECKS if case.id.startswith("operators/") else tuple(CHECKS)
    return tuple(dict.fromkeys((*always, *(name for name in case.checks if _applies(name, config)))))


def _applies(name: str, config: ModelConfig | None) -> bool:
    applies = getattr(INVARIANTS.get(name), "applies", None)
    return config is None or applies is None or applies(config)


def judge_case(evidence: Evidence) -> tuple[Answer, ...]:
    """The answers of all checks of the case, in order of accusation; one that does not exist is not run, and named."""
    known = CHECKS | INVARIANTS | MEASURED
    return tuple(
        known[name].judge(evidence)
        if name in known
        else answer(name, evidence, "not_run", "there is no check of this name")
        for name in checks_of(evidence.case, evidence.config)
    )


def extra_runs_of(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """The further runs that the checks of a case want, each label once, those that others are compared with first.

    Raises ValueError when two checks mean different runs by one label.
    """
    found: dict[str, ExtraRun] = {}
    for name in case.checks:
        wanted = name in INVARIANTS and _applies(name, config)
        for run in INVARIANTS[name].runs(case, outputs, config) if wanted else ():
            if found.setdefault(run.label, run) != run:
                raise ValueError(f"two checks of case {case.id} mean different runs by {run.label!r}")
    return tuple(sorted(found.values(), key=lambda run: bool(run.against)))


def judge_run(evidence: Sequence[Evidence]) -> tuple[Answer, ...]:
    """The answers of the checks on a whole run; a check that has nothing to ask of this run gives none."""
    answers = (check.judge_run(evidence) for check in RUN_CHECKS.values())
    return tuple(a for a in answers if a is not None)
