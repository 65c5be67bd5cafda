"""The further runs of a case that the invariants ask for, as pure functions of the case and of what was answered.

Every further run is forced to the tokens of the judged run, so that its rows stand beside those of the judged run.
No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from day0check.compare.pairing import Pairing
from day0check.types import Outputs, Request, RunCase, Schedule, Turn

if TYPE_CHECKING:
    from reference.config import ModelConfig

JUDGED = ""  # the label of the judged run


@dataclass(frozen=True)
class ExtraRun:
    """One further run. `label` names it within its case, `words` end a sentence that begins with "with".

    `against`: label of the run that it is compared with; `pairings`: which rows; `bits`: the same bytes are promised.
    What must show, else the run says nothing: requests `recomputed` compute some position twice, `reused` ones not all,
    `once` each exactly once; `rested` ones are away for some steps; prompts of `chunked` ones take several steps;
    of `merged` ones rows have partial results of attention that were merged.
    `lenders`: (request, the one behind whose cached prefix it begins). `also`: whose results are kept besides.
    `identity`: operators that are replaced by one that gives its first argument back; `law`: what the run's own results
    must hold by themselves ("copies", "experts", "splice"), or beside those of the run that it is compared with
    ("parts").
    """

    label: str
    words: str
    requests: tuple[Request, ...]
    schedule: Schedule
    pairings: tuple[Pairing, ...]
    against: str = JUDGED
    bits: bool = False
    recomputed: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    chunked: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    rested: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    lenders: tuple[tuple[str, str], ...] = ()
    also: tuple[str, ...] = ()
    identity: tuple[str, ...] = ()
    law: str = ""


def predicted(case: RunCase) -> Outputs:
    """Answers of the lengths that the case asks for, as a stand-in for a plan that is made before the run."""
    sequences, generated = {}, {}
    for request in case.requests:
        tokens: list[int] = []
        spans = []
        for turn in request.turns:
            tokens += turn.tokens
            spans.append((len(tokens), len(tokens) + request.max_new_tokens))
            tokens += [0] * request.max_new_tokens
        sequences[request.id], generated[request.id] = tuple(tokens), tuple(spans)
    return Outputs(sequences, generated)


def name_of(request_id: str) -> str:
    """The part of a request's id that its case gave it."""
    return request_id.rpartition("/")[2].partition("#")[0]


def answered(case: RunCase, outputs: Outputs) -> tuple[Request, ...]:
    """Requests of the case that the judged run answered to their end, forced to their own answers."""
    found = []
    for request in case.requests:
        if outputs.sequences.get(request.id) and outputs.finish.get(request.id) != "aborted":
            found.append(forced(request, outputs))
    return tuple(found)


def forced(request: Request, outputs: Outputs) -> Request:
    """The request with every answer token prescribed as it was answered."""
    sequence = outputs.sequences[request.id]
    return replace(request, forced=tuple(sequence[a:b] for a, b in outputs.generated.get(request.id, ())))


def at_once(requests: Iterable[Request]) -> tuple[Request, ...]:
    """The same requests, all there from the first step."""
    return tuple(replace(r, arrive_step=0) for r in requests)


def as_prompt(request: Request, outputs: Outputs, *, until: int | None = None) -> Request:
    """What the judged run computed of a request as one prompt without an answer; `until`: only its first positions,
    which must hold every image wholly or not at all."""
    tokens = outputs.sequences[request.id]
    last = outputs.generated.get(request.id, ())[-1:]
    chosen_last = bool(last) and last[0][0] < last[0][1] == len(tokens)  # a token chosen last is never an input
    length = len(tokens) - chosen_last
    images = tuple(image for turn in request.turns for image in turn.images)
    return Request(request.id, (Turn(tokens[: length if until is None else min(until, length)], images),))


def plain(case: RunCase, **changes: object) -> Schedule:
    """The schedule of the case without its events."""
    return replace(case.schedule, **{"events": (), **changes})


def pairs(requests: Iterable[Request], *, until: int | None = None) -> tuple[Pairing, ...]:
    """Every request with itself in the other run."""
    return tuple(Pairing(r.id, r.id, until) for r in requests)


def again(case: RunCase, outputs: Outputs) -> ExtraRun:
    """The judged run once more: what a run that promises the same bytes is held against."""
    requests = tuple(forced(r, outputs) for r in case.requests if r.id in outputs.sequences)
    compared = pairs(answered(case, outputs))
    return ExtraRun("again", "the same schedule a second time", requests, case.schedule, compared, bits=True)


def edges(case: RunCase, config: ModelConfig) -> tuple[int, ...]:
    """Numbers of tokens at which something changes in the engine or the model, and one more and one less."""
    sizes = {case.schedule.page}
    if config.index is not None:
        sizes.add(config.index.topk)
    if config.kda is not None:
        sizes.add(config.kda.chunk)
    return tuple(sorted({n + d for n in sizes for d in (-1, 0, 1) if n + d > 0}))


def other_words(tokens: tuple[int, ...], config: ModelConfig, *, begin: int = 0, salt: int = 1) -> tuple[int, ...]:
    """`tokens` with every plain one from `begin` on replaced by another plain one; special tokens and pads stay."""
    special = set(vars(config.tokens).values())
    plain_tokens = sorted({t for t in tokens if t not in special}) or [0]
    place = {t: i for i, t in enumerate(plain_tokens)}

    def other(at: int, token: int) -> int:
        if at < begin or token in special:
            return token
        moved = plain_tokens[(place[token] + salt + at) % len(plain_tokens)]
        if moved != token:
            return moved
        return next((t for t in (token ^ 1, token ^ 2) if t not in special and t < config.vocab), token)

    return tuple(other(at, token) for at, token in enumerate(tokens))
