"""Memory that nobody wrote: what it holds, where it lies and how its rows are strided shows in no result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, again, answered, forced, pairs
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Are the bytes the same whatever unused memory holds, wherever the pools lie and however they are strided?"
NAME = "poisoned_memory"
KINDS = {
    "garbage": "finite garbage in all memory that nobody has written",
    "shuffled": "other pages and slots",
    "end": "pages and slots at the end of larger pools",
    "strided": "pools that are views of larger allocations",
}


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """The judged schedule in each kind of memory: the same shapes in every step, so the same bytes."""
    compared = answered(case, outputs)
    if not compared:
        return ()
    requests = tuple(forced(r, outputs) for r in case.requests if r.id in outputs.sequences)
    found = [again(case, outputs)]
    for kind, words in KINDS.items():
        schedule = replace(case.schedule, memory=kind)
        found.append(ExtraRun(f"memory-{kind}", words, requests, schedule, pairs(compared), bits=True))
    return tuple(found)


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="no request of the case was answered")
