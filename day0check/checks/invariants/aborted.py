"""Abort: what is left of a request that ended early must not reach anybody."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, at_once, name_of, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, RunCase, ScheduleEvent

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does a request that is aborted leave its neighbours, and those that come into its place, alone?"
NAME = "aborted"
_STEP = 3


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """Each request in turn aborted, so that one that waits takes its memory: the batch has one place too few."""
    requests = answered(case, outputs)
    if len(requests) < 2:
        return ()
    found = []
    for request in requests:
        others = tuple(r for r in requests if r.id != request.id)
        first = at_once((request, *others))
        waiting = (*first[:-1], replace(first[-1], arrive_step=_STEP))
        events = (ScheduleEvent(_STEP, "abort", request.id),)
        found.append(
            ExtraRun(
                f"abort-{name_of(request.id)}",
                f"request {name_of(request.id)} aborted at step {_STEP}",
                waiting,
                plain(case, max_batch=max(1, len(requests) - 1), events=events),
                pairs(others),
            )
        )
    return tuple(found)


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="the case has only one request")
