"""A request alone against the same request among others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, at_once, name_of, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, Request, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does every request give the same alone as in the batch of the case, at every row?"
NAME = "alone_equals_batched"


def alone(case: RunCase, request: Request) -> ExtraRun:
    """One request of the case by itself, forced to its answers."""
    name = name_of(request.id)
    words = f"request {name} alone"
    return ExtraRun(f"alone-{name}", words, at_once((request,)), plain(case), pairs((request,)))


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    return tuple(alone(case, r) for r in answered(case, outputs)) if len(case.requests) > 1 else ()


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="the case has only one request")
