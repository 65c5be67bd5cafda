"""An endpoint's greedy answers against the reference, which is fed the endpoint's own tokens (teacher forcing).

The endpoint is a black box: its choices inside a step are unknown, so every replicate makes its own, and what a flipped
choice does to log-probabilities is part of the noise. That costs power against small faults; local replay has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from day0check.compare.logits import MARGIN_LIMIT, given_up_noises
from day0check.compare.net_noise import add_float32_noise
from day0check.compare.rounding import Rounder
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import PROFILES, Profile
from reference.model import Model
from reference.weights import Checkpoint

REPLICATES = 4
DELTA_NOISES = 4.0  # of the largest change among all replicates and tokens: changes are heavy-tailed
RMS_NOISES = 2.5
FLOOR = 2e-5  # nats: log-probabilities travel as float32 and in decimal


@dataclass(frozen=True)
class WireAnswer:
    """What the endpoint said to a prompt of token ids; `logprobs` of its tokens, None where it gave none."""

    label: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Followed:
    """One answer against the oracle.

    `margin`: the most that a chosen token gave up against the oracle's best, in noises of the logits, at token
    `margin_at`. `delta`: largest |log-probability - oracle's| in nats, at token `delta_at`; `rms`: their root mean
    square; None where the endpoint gave no log-probabilities. Limits come from replicates of the same tokens.
    """

    label: str
    tokens: int
    margin: float
    margin_at: int
    margin_limit: float
    delta: float | None = None
    delta_at: int | None = None
    delta_limit: float = math.inf
    rms: float | None = None
    rms_limit: float = math.inf


def follow(
    model: str | Path | Checkpoint,
    profile: str | Profile,
    answers: Sequence[WireAnswer],
    *,
    device: str = "cpu",
    replicates: int = REPLICATES,
    seed: int = 0,
) -> tuple[Followed, ...]:
    """One row per answer. Replicates round at random at the profile's points; limits are pooled over all answers.

    Raises ValueError for an answer without tokens or longer than the model's positions.
    """
    profile = PROFILES[profile] if isinstance(profile, str) else profile
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint(model)
    # rounding points of bfloat16 lie far above the arithmetic of float32; those of float32 do not
    narrow = torch.float64 if profile.act_dtype == "float32" else torch.float32
    oracle = Model(checkpoint, dtype=torch.float64, device=device)
    expected = Model(checkpoint, dtype=narrow, device=device)
    seen = []
    for index, answer in enumerate(answers):
        exact = _rows(oracle, answer)
        copies = torch.stack(
            [_rows(expected, answer, _rounding(profile, (seed, index, r), device)).double() for r in range(replicates)]
        )
        seen.append((answer, exact, copies))
    noise = torch.cat([(_logprobs(c, a) - _logprobs(e, a)).flatten() for a, e, c in seen]) if seen else torch.zeros(1)
    largest, square = float(noise.abs().max()), float(noise.square().mean().sqrt())
    return tuple(_row(a, e, c, DELTA_NOISES * largest + FLOOR, RMS_NOISES * square + FLOOR) for a, e, c in seen)


def _rows(model: Model, answer: WireAnswer, call: Callable[..., Any] | None = None) -> torch.Tensor:
    """Logits [tokens, vocab] that chose the answer's tokens."""
    fed = [*answer.prompt, *answer.tokens[:-1]]
    logits = model.forward(fed, **({"call": call} if call else {}))
    return logits[len(answer.prompt) - 1 :]


def _rounding(profile: Profile, key: tuple[int, ...], device: str) -> Callable[..., Any]:
    """A `call` that rounds at random where the profile rounds, and adds float32's noise where it does not."""
    generator = torch.Generator(device).manual_seed(1_000_003 * key[0] + 1009 * key[1] + key[2] + 1)

    def call(place: str, operator: str, function: Callable, *args: Any, site: str = "", **kwargs: Any) -> Any:
        points = profile.points_of(operator)
        result = function(*args, **(kwargs | {"round": Rounder(points, "random", generator)} if points else kwargs))
        if profile.act_dtype != "float32" or operator not in CONTRACTS or CONTRACTS[operator].kind != "compute":
            return result
        terms = max(args[0].shape[1:], default=1)
        several = result if isinstance(result, tuple) else (result,)
        noisy = tuple(add_float32_noise(value, terms, generator) for value in several)
        return noisy if isinstance(result, tuple) else noisy[0]

    return call


def _logprobs(logits: torch.Tensor, answer: WireAnswer) -> torch.Tensor:
    """Log-probabilities [..., tokens] of the answer's tokens under `logits` [..., tokens, vocab]."""
    at = torch.tensor(answer.tokens, device=logits.device).clamp(0, logits.shape[-1] - 1)
    return logits.double().log_softmax(-1).gather(-1, at.expand(logits.shape[:-1]).unsqueeze(-1)).squeeze(-1)


def _row(
    answer: WireAnswer, oracle: torch.Tensor, copies: torch.Tensor, delta_limit: float, rms_limit: float
) -> Followed:
    tokens = torch.tensor(answer.tokens, device=oracle.device)
    given_up = given_up_noises(oracle, tokens, copies)
    row = Followed(answer.label, len(tokens), float(given_up.max()), int(given_up.argmax()), MARGIN_LIMIT)
    if answer.logprobs is None:
        return row
    said = torch.tensor(answer.logprobs, dtype=torch.float64, device=oracle.device)
    delta = (said - _logprobs(oracle, answer)).abs().nan_to_num(nan=math.inf)
    return Followed(
        row.label,
        row.tokens,
        row.margin,
        row.margin_at,
        row.margin_limit,
        float(delta.max()),
        int(delta.argmax()),
        delta_limit,
        float(delta.square().mean().sqrt()),
        rms_limit,
    )
