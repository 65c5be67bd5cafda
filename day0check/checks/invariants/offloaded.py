"""Eviction to the host tier and back: the memory of a request that returns is that which left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, at_once, name_of, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, Request, RunCase, Schedule, ScheduleEvent

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does a request whose memory went to the host tier and came back go on as if nothing had happened?"
NAME = "offloaded"
LEAVES, RETURNS = 4, 10  # steps; the request rests in between


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """Each request that decodes for long enough leaves for the host tier in the middle; and all under short memory."""
    requests = answered(case, outputs)
    if not requests:
        return ()
    needs = _pages(case, requests, outputs)
    found = []
    for request in filter(long_enough, requests):
        found.append(
            ExtraRun(
                f"offload-{name_of(request.id)}",
                f"request {name_of(request.id)} in the host tier from step {LEAVES} to {RETURNS}",
                at_once(requests),
                away(case, requests, request, outputs),
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


def long_enough(request: Request) -> bool:
    """Whether a request, forced to its answers, decodes for long enough to leave in the middle."""
    return max((len(f) for f in request.forced), default=0) >= LEAVES + 2


def away(case: RunCase, requests: Sequence[Request], request: Request, outputs: Outputs) -> Schedule:
    """The schedule of `requests` in which one of them is in the host tier for some steps."""
    events = (ScheduleEvent(LEAVES, "offload", request.id), ScheduleEvent(RETURNS, "reload", request.id))
    return plain(case, events=events, host_pages=sum(_pages(case, requests, outputs)))


def _pages(case: RunCase, requests: Sequence[Request], outputs: Outputs) -> list[int]:
    """Pages that each request may need, the smallest number first."""
    return sorted(pages_of(case, r, outputs) for r in requests)


def pages_of(case: RunCase, request: Request, outputs: Outputs) -> int:
    """Pages that a request of the case may need."""
    return -(-len(outputs.sequences[request.id]) // case.schedule.page) + 1


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="no request of the case decodes for long enough")
