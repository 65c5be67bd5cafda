"""The prefix cache: a request that begins behind what another one has computed gives what a cold one gives."""

from __future__ import annotations

from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import (
    ExtraRun,
    answered,
    as_prompt,
    at_once,
    name_of,
    other_words,
    pairs,
    plain,
)
from day0check.checks.invariants.judging import judge_runs
from day0check.compare.pairing import Pairing
from day0check.types import Outputs, Request, RunCase, Schedule, Turn

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does a request behind a cached prefix give what a cold one gives, wherever inside a block the two part?"
NAME = "warm_prefix"
_PAGE = 8  # small blocks: a run for every offset in one is then affordable
_BLOCKS = 3  # of the short request whose neighbour parts from it in the second


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """A neighbour that parts at every offset of the second block; the same sequence twice; all requests in turn."""
    requests = answered(case, outputs)
    if not requests:
        return ()
    longest = max(requests, key=lambda r: len(outputs.sequences[r.id]))
    in_turn = plain(case, max_batch=1, chunk=None, prefix_cache=True)
    every = at_once(requests)
    words, lent = "all requests in turn behind one cache", _nearest_before(every, outputs, config)
    found = [ExtraRun("warm-in-turn", words, every, in_turn, pairs(every), lenders=lent)]
    found.append(_twice(longest, outputs, in_turn))
    texts = [r for r in requests if not any(turn.images for turn in r.turns)]
    longest_text = max(texts, key=lambda r: len(outputs.sequences[r.id]), default=None)
    if longest_text is not None:
        prompt = as_prompt(longest_text, outputs, until=_BLOCKS * _PAGE + 2)
        if len(prompt.turns[0].tokens) > 2 * _PAGE:
            small = plain(case, max_batch=1, chunk=None, prefix_cache=True, page=_PAGE)
            found += [_parting(prompt, at, small, config) for at in range(_PAGE, 2 * _PAGE)]
    return tuple(found)


def _nearest_before(
    requests: tuple[Request, ...], outputs: Outputs, config: ModelConfig
) -> tuple[tuple[str, str], ...]:
    """(request, the one before it that has most of its first tokens and images)."""
    found = []
    for number, request in enumerate(requests[1:], 1):
        mine = _content(request, outputs, config)
        alike = {r.id: _alike(mine, _content(r, outputs, config)) for r in requests[:number]}
        found.append((request.id, max(alike, key=alike.get)))
    return tuple(found)


def _content(request: Request, outputs: Outputs, config: ModelConfig) -> tuple[Any, ...]:
    """The sequence of a request, a media pad with the images of its turn."""
    pad, turns = config.tokens.media_pad, list(request.turns)
    ends = [begin for begin, _ in outputs.generated.get(request.id, ())]
    found = []
    for position, token in enumerate(outputs.sequences[request.id]):
        turn = next((n for n, end in enumerate(ends) if position < end), len(turns) - 1)
        found.append((token, turns[turn].images) if token == pad else token)
    return tuple(found)


def _alike(a: tuple[Any, ...], b: tuple[Any, ...]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def _twice(request: Request, outputs: Outputs, schedule: Schedule) -> ExtraRun:
    """The whole sequence as a prompt of another request, and then the request itself."""
    first = replace(as_prompt(request, outputs), id=f"{request.id}~first")
    name = name_of(request.id)
    words = f"request {name} behind a cache that holds its whole sequence"
    both = at_once((first, request))
    compared = (Pairing(first.id, request.id), *pairs((request,)))
    lent = ((request.id, first.id),)
    return ExtraRun(f"warm-{name}", words, both, schedule, compared, reused=(request.id,), lenders=lent)


def _parting(prompt: Request, at: int, schedule: Schedule, config: ModelConfig) -> ExtraRun:
    """A neighbour with the same tokens before position `at` and others from there on; then the prompt itself."""
    (turn,) = prompt.turns
    other = Request(f"{prompt.id}~first", (Turn(other_words(turn.tokens, config, begin=at)),))
    words = f"request {name_of(prompt.id)} behind the cache of a neighbour that parts from it at position {at}"
    label, both = f"warm-{name_of(prompt.id)}-{at}", (other, prompt)
    compared = (Pairing(other.id, prompt.id, until=at), *pairs((prompt,)))
    lent = ((prompt.id, other.id),)
    return ExtraRun(label, words, both, schedule, compared, reused=(prompt.id,), lenders=lent)


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="no request of the case was answered")
