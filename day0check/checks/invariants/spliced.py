"""The splice: image features and embeddings at the positions that are theirs, with cuts inside an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, as_prompt, at_once, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does every media pad hold its own image feature, and every other position its own embedding?"
NAME = "spliced"


def applies(config: ModelConfig) -> bool:
    return config.vision is not None


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """All sequences as prompts, in one step and in chunks whose edges lie inside images."""
    prompts = at_once(as_prompt(r, outputs) for r in answered(case, outputs))
    if not any(turn.images for r in prompts for turn in r.turns):
        return ()
    found = []
    for chunk, words in ((None, "prompts in one step"), (7, "prompts in chunks of 7")):
        label = f"splice-{chunk or 'whole'}"
        schedule = plain(case, chunk=chunk)
        found.append(ExtraRun(label, words, prompts, schedule, pairs(prompts), also=("splice.merge",), law="splice"))
    return tuple(found)


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="the case has no image")
