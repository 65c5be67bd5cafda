"""Causality without a reference: a later token never moves what was computed before it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.decode_equals_prefill import whole
from day0check.checks.invariants.extra_runs import ExtraRun, answered, as_prompt, name_of, other_words, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, Request, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does a change of later tokens leave every earlier position as it is?"
NAME = "causality"


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """Each sequence as one prompt beside the same one whose words change in the middle, or only at the end."""
    found: list[ExtraRun] = []
    for request in answered(case, outputs):
        prompt = as_prompt(request, outputs)
        length = len(prompt.turns[0].tokens)
        cuts = [cut for cut in sorted({length // 2, length - 2}) if cut > 0]
        if cuts:
            as_it_is = whole(case, request, outputs)
            found += [as_it_is, *(_changed(case, prompt, cut, config, as_it_is.label) for cut in cuts)]
    return tuple(found)


def _changed(case: RunCase, prompt: Request, cut: int, config: ModelConfig, against: str) -> ExtraRun:
    name, (turn,) = name_of(prompt.id), prompt.turns
    other = replace(prompt, turns=(replace(turn, tokens=other_words(turn.tokens, config, begin=cut)),))
    words = f"other words from position {cut} of request {name} on"
    label, schedule = f"later-{name}-{cut}", plain(case, chunk=None)
    return ExtraRun(label, words, (other,), schedule, pairs((other,), until=cut), against=against)


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="no request of the case has two tokens")
