"""Chunked prefill against one shot, in budgets around the edges of a page, a chunk of the delta rule and the top-k."""

from __future__ import annotations

from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, as_prompt, at_once, edges, pairs, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Outputs, Request, RunCase, Turn

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Do prompts in chunks of any size give what a prompt in one step gives?"
NAME = "chunked_equals_one_shot"
_SINGLE = 24  # rows of the run with chunks of one row: each is a step of its own


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """All sequences as prompts, in chunks one below, at and one above every edge; and a short one row by row."""
    prompts = tuple(as_prompt(r, outputs) for r in answered(case, outputs))
    if not prompts:
        return ()
    longest = max(prompts, key=_length)
    found = []
    for size in edges(case, config):
        long = tuple(r for r in prompts if _length(r) > size)
        if long:
            chunked = tuple(r.id for r in long)
            words = f"prompts in chunks of {size}"
            schedule = plain(case, chunk=size)
            found.append(ExtraRun(f"chunk-{size}", words, at_once(long), schedule, pairs(long), chunked=chunked))
    short = _begin(longest, _SINGLE)
    if short is not None:
        words, schedule = f"the first {_SINGLE} tokens row by row", plain(case, chunk=1)
        found.append(ExtraRun("chunk-1", words, (short,), schedule, pairs((short,)), chunked=(short.id,)))
    return tuple(found)


def _length(request: Request) -> int:
    return len(request.turns[0].tokens)


def _begin(request: Request, count: int) -> Request | None:
    """The first tokens of a prompt; None where an image lies in it."""
    if request.turns[0].images or _length(request) < 2:
        return None
    return Request(request.id, (Turn(request.turns[0].tokens[:count]),))


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="no prompt of the case is longer than a page")
