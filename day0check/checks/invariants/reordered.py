"""The same requests in other orders and at other times."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, at_once, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does the order in which requests come and stand in the batch change nothing?"
NAME = "reordered"


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """All at once in the reverse order; rotated by one; and one after another from the last on."""
    requests = answered(case, outputs)
    if len(requests) < 2:
        return ()
    every, backwards = pairs(requests), requests[::-1]
    late = tuple(replace(r, arrive_step=2 * number) for number, r in enumerate(backwards))
    return (
        ExtraRun("reversed", "requests in the reverse order", at_once(backwards), plain(case), every),
        ExtraRun("rotated", "the first request last", at_once((*requests[1:], requests[0])), plain(case), every),
        ExtraRun("staggered", "requests coming late, the last one first", late, plain(case), every),
    )


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="the case has only one request")
