"""The laws around the experts, without a reference: experts that give back what they get make them visible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, forced
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Is every pair of token and expert computed exactly once, and the routed scaling applied exactly once?"
NAME = "experts_once"


def applies(config: ModelConfig) -> bool:
    return any(config.is_moe(layer) for layer in range(len(config.layers)))


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """The judged schedule with experts that give back their input."""
    if not answered(case, outputs):
        return ()
    requests = tuple(forced(r, outputs) for r in case.requests if r.id in outputs.sequences)
    return (
        ExtraRun(
            "identity-experts",
            "experts that give back what they get",
            requests,
            case.schedule,
            (),
            also=("moe.scores", "moe.dispatch", "moe.experts", "moe.combine"),
            identity=("moe.experts",),
            law="experts",
        ),
    )


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="no request of the case was answered")
