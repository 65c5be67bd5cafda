"""Steps that hold rows of prompts and single tokens of answers together."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Do answers that ride along in steps of prompts stay what they are?"
NAME = "mixed_steps"


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """Requests coming late, the shortest first, in chunks beside which the answers of the others run."""
    requests = sorted(answered(case, outputs), key=lambda r: len(outputs.sequences[r.id]))
    if len(requests) < 2:
        return ()
    late = tuple(replace(r, arrive_step=2 * number) for number, r in enumerate(requests))
    found = []
    for chunk in (case.schedule.page - 1, case.schedule.page + 5):
        words = f"answers beside prompts in chunks of {chunk}"
        schedule = plain(case, mixed=True, chunk=chunk)
        found.append(ExtraRun(f"mixed-{chunk}", words, late, schedule, pairs(requests)))
    return tuple(found)


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="the case has only one request")
