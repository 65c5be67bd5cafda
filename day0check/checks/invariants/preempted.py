"""Preemption: a request that lost its memory and computed it anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, at_once, name_of, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, RunCase, ScheduleEvent

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does a request that is preempted and resumed give what an undisturbed one gives, and its neighbours too?"
NAME = "preempted"


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """Each request preempted in the middle of its prompt or right behind it, and once more in its decode."""
    requests = answered(case, outputs)
    rows = sum(len(turn.tokens) for r in requests for turn in r.turns)
    if not rows:
        return ()
    chunk = max(2, rows // 3 + 1)  # prompts take a few steps, so that the first event falls among them
    found = []
    for request in requests:
        events = tuple(ScheduleEvent(step, "preempt", request.id) for step in (2, 9))
        found.append(
            ExtraRun(
                f"preempt-{name_of(request.id)}",
                f"request {name_of(request.id)} preempted twice",
                at_once(requests),
                plain(case, chunk=chunk, events=events),
                pairs(requests),
                recomputed=(request.id,),
            )
        )
    return tuple(found)


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="no request of the case was answered")
