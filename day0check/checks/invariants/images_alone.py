"""An image by itself against the same image among others: the tower must not let them see each other."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from day0check.checks.evidence import Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, answered, name_of, plain
from day0check.checks.invariants.judging import judge_runs
from day0check.compare.pairing import Pairing
from day0check.types import Outputs, Request, RunCase, Turn

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Does the tower make the same of an image alone as of the same image among others?"
NAME = "images_alone"


def applies(config: ModelConfig) -> bool:
    return config.vision is not None


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """For each image of a turn with several: a prompt of its pads with the tokens around them."""
    found = []
    for request in answered(case, outputs):
        position = 0
        for turn, answer in zip(request.turns, (*request.forced, *[()] * len(request.turns)), strict=False):
            if len(turn.images) > 1:
                found += _each(case, request, turn, position, config.tokens.media_pad)
            position += len(turn.tokens) + len(answer)
    return tuple(found)


def _each(case: RunCase, request: Request, turn: Turn, position: int, pad: int) -> list[ExtraRun]:
    """`position`: that of the turn's first token."""
    spans = _spans(turn.tokens, pad)
    if len(spans) != len(turn.images):
        return []  # images in several pieces: which pads are whose does not show in the tokens
    found = []
    for number, ((begin, end), image) in enumerate(zip(spans, turn.images, strict=True)):
        first = max(begin - 1, 0)
        alone = Request(request.id, (Turn(turn.tokens[first : end + 1], (image,)),))
        label = f"image-{name_of(request.id)}-{position + begin}"
        words = f"image {number + 1} of request {name_of(request.id)} alone"
        shift = position + first
        paired = (Pairing(request.id, request.id, until=0, shift=shift),)
        found.append(ExtraRun(label, words, (alone,), plain(case, chunk=None), paired))
    return found


def _spans(tokens: tuple[int, ...], pad: int) -> list[tuple[int, int]]:
    """Half-open runs of media pads."""
    edges = [0, *(int(t == pad) for t in tokens), 0]
    changes = [at for at, (a, b) in enumerate(pairwise(edges)) if a != b]
    return list(zip(changes[::2], changes[1::2], strict=True))


def judge(evidence: Evidence) -> Answer:
    return judge_runs(NAME, evidence, runs, nothing="no turn of the case has several images whose pads lie apart")
