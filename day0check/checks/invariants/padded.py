"""Decode steps of a fixed number of rows, as the replay of a captured graph has them: padding rows are nobody's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Do padding rows, which hold what earlier requests left there, change nothing for the rows beside them?"
NAME = "padded"
_PADDING = 2  # rows more than there are requests


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """Requests that come late and end at different steps, so that padding rows hold what finished ones left."""
    requests = sorted(answered(case, outputs), key=lambda r: len(outputs.sequences[r.id]))
    if not any(len(answer) > 1 for r in requests for answer in r.forced):
        return ()
    late = tuple(replace(r, arrive_step=3 * number) for number, r in enumerate(requests))
    rows = len(requests) + _PADDING
    words = f"decode steps padded to {rows} rows"
    return (ExtraRun(f"padded-{rows}", words, late, plain(case, fixed_rows=rows), pairs(requests)),)


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="no request of the case decodes")
