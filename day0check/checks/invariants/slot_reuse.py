"""Slots and pages that others have used before: the same bytes as in fresh ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.alone_equals_batched import alone
from day0check.checks.invariants.extra_runs import ExtraRun, again, answered, at_once, name_of, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does a request in memory that others have used give the same bytes as in fresh memory?"
NAME = "slot_reuse"


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """One request after another in a single place, the last one beside itself alone: the same shapes in every step."""
    requests = answered(case, outputs)
    if len(requests) < 2:
        return ()
    found = [again(case, outputs)]
    for order in (requests, requests[::-1]):
        last = order[-1]
        fresh, name = alone(case, last), name_of(last.id)
        used = ExtraRun(
            f"used-{name}",
            f"request {name} in memory that all others have used",
            at_once(order),
            plain(case, max_batch=1),
            pairs((last,)),
            against=fresh.label,
            bits=True,
        )
        found += [fresh, used]
    return tuple(found)


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="the case has only one request")
