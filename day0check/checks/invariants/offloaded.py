"""Eviction to the host tier and back: the memory of a request that returns is that which left."""

from __future__ import annotations

from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, at_once, name_of, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, RunCase, ScheduleEvent

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does a request whose memory went to the host tier and came back go on as if nothing had happened?"
NAME = "offloaded"
_LEAVES, _RETURNS = 4, 10  # steps; the request rests in between


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """Each request that decodes for long enough leaves for the host tier in the middle; and all under short memory."""
    requests = answered(case, outputs)
    if not requests:
        return ()
    page = case.schedule.page
    needs = sorted(-(-len(outputs.sequences[r.id]) // page) + 1 for r in requests)
    found = []
    for request in requests:
        if max((len(f) for f in request.forced), default=0) < _LEAVES + 2:
            continue
        events = (ScheduleEvent(_LEAVES, "offload", request.id), ScheduleEvent(_RETURNS, "reload", request.id))
        found.append(
            ExtraRun(
                f"offload-{name_of(request.id)}",
                f"request {name_of(request.id)} in the host tier from step {_LEAVES} to {_RETURNS}",
                at_once(requests),
                plain(case, events=events, host_pages=sum(needs)),
                pairs(requests),
                once=(request.id,),
                rested=(request.id,),
            )
        )
    if found and len(requests) > 1:
        short = plain(case, pages=needs[-1] + needs[0] - 1, host_pages=sum(needs))
        words = "memory for hardly more than one request, the others in the host tier"
        found.append(ExtraRun("short-memory", words, at_once(requests), short, pairs(requests)))
    return tuple(found)


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="no request of the case decodes for long enough")
