"""Decode against prefill: what a token at a time computed, the whole sequence as one prompt must compute, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, as_prompt, name_of, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, Request, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does decode compute what a prefill of the same tokens computes, at every position?"
NAME = "decode_equals_prefill"


def whole(case: RunCase, request: Request, outputs: Outputs) -> ExtraRun:
    """The whole sequence of a request in one prompt and one step."""
    name = name_of(request.id)
    words = f"the whole sequence of request {name} as one prompt"
    asked = (as_prompt(request, outputs),)
    return ExtraRun(f"whole-{name}", words, asked, plain(case, chunk=None), pairs((request,)))


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """Each request that decoded, as a prompt."""
    return tuple(
        whole(case, r, outputs) for r in answered(case, outputs) if any(b - a > 1 for a, b in outputs.generated[r.id])
    )


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="no request of the case decodes")
