"""Isolation: what the neighbours say never reaches a request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, name_of, other_words, pairs
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, Request, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does a request stay as it is when the words of all its neighbours change?"
NAME = "isolation"


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """For each request the schedule of the case, in which all others speak of something else, each in its own words."""
    if len(answered(case, outputs)) < 2:
        return ()
    found = []
    for target in answered(case, outputs):
        requests = tuple(
            target if r.id == target.id else _in_other_words(r, config, salt=1 + number)
            for number, r in enumerate(answered(case, outputs))
        )
        name = name_of(target.id)
        words = f"other words in every request but {name}"
        found.append(ExtraRun(f"others-{name}", words, requests, case.schedule, pairs((target,))))
    return tuple(found)


def _in_other_words(request: Request, config: ModelConfig, *, salt: int) -> Request:
    """The same lengths, images and special tokens; prompts and answers are other ones."""
    turns = tuple(replace(t, tokens=other_words(t.tokens, config, salt=salt)) for t in request.turns)
    return replace(request, turns=turns, forced=tuple(other_words(f, config, salt=salt) for f in request.forced))


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="the case has only one request")
