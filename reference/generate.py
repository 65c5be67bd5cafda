"""Generation with caches: prefill, then one token at a time, over the turns of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from reference.layers import Call, just_call
from reference.model import Image, Model, State
from reference.sampling import sample


class Turn(Protocol):
    """Tokens of a user turn, media pads in place, and its images in order."""

    tokens: Sequence[int]
    images: Sequence[Image]


class Conversation(Protocol):
    """A request as the harness describes it; `forced` replaces the model's own choices, one tuple per turn."""

    turns: Sequence[Turn]
    max_new_tokens: int
    stop_tokens: Sequence[int]
    temperature: float
    seed: int
    forced: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Generated:
    """`tokens`: the whole sequence; `spans`: half-open ranges of it that the model chose; `finish`: "stop"|"length";
    `logits` [rows, vocab]: one row per chosen token, in order."""

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    finish: str
    logits: Tensor


def generate(model: Model, request: Conversation, *, call: Call = just_call, form: str = "absorbed") -> Generated:
    """Answers every turn of the request. The last token of an answer is fed with the turn that follows it.

    A draw uses (seed, position of the row that gave the logits).
    """
    state, tokens, spans, finish = model.start(), [], [], "length"
    rows: list[Tensor] = []
    pending: list[int] = []
    for number, turn in enumerate(request.turns):
        tokens += turn.tokens
        logits = model.extend(state, [*pending, *turn.tokens], images=turn.images, call=call, form=form)[-1:]
        begin = len(tokens)
        forced = request.forced[number] if request.forced else None
        finish, pending = "length", []
        for step in range(len(forced) if forced is not None else request.max_new_tokens):
            if step:
                logits = model.extend(state, tokens[-1:], call=call, form=form)
            rows.append(logits)
            token = _choose(logits, request, state) if forced is None else forced[step]
            tokens.append(token)
            pending = [token]
            if token in request.stop_tokens:
                finish = "stop"
                break
        spans.append((begin, len(tokens)))
    return Generated(
        tuple(tokens), tuple(spans), finish, torch.cat(rows) if rows else torch.empty(0, model.config.vocab)
    )


def _choose(logits: Tensor, request: Conversation, state: State) -> int:
    device = logits.device
    return int(
        sample(
            logits,
            temperature=torch.tensor([request.temperature], device=device),
            seed=torch.tensor([request.seed], device=device),
            positions=torch.tensor([state.length - 1], device=device),
        )
    )
