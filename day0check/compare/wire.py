"""An endpoint's greedy answers against the reference, which is fed the endpoint's own tokens (teacher forcing).

The endpoint is a black box: its choices inside a step are unknown, so every replicate makes its own, and what a flipped
choice does to log-probabilities is part of the noise. Noise is heavy-tailed then, so an answer's statistics are held
against the same statistics of the replicates' answers, never against a variance. That costs power against small faults
in low precision; local replay has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from day0check.compare import kept_states
from day0check.compare.matched_answers import compare_answers, heard_logprobs
from day0check.compare.net_noise import add_float32_noise
from day0check.compare.rounding import Rounder
from day0check.contracts import CONTRACTS
from day0check.contracts.profiles import PROFILES, Profile
from day0check.types import Measure
from reference.model import Model
from reference.weights import Checkpoint

REPLICATES = 4
# times the largest value among all answers of all replicates; random rounding lies above what an endpoint does, so the
# true margin is wider.
FACTORS = {"median": 2.0, "ninety": 2.0, "differing": 2.0, "given_up": 2.0}
FLOORS = {"median": 2e-5, "ninety": 5e-5, "differing": 0.1, "given_up": 1e-3}  # nats (shares for "differing")


@dataclass(frozen=True)
class WireAnswer:
    """What the endpoint said to a prompt of token ids; `logprobs` of its tokens, None where it gave none."""

    label: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Followed:
    """One answer against the oracle: `statistics` and `limits` share keys.

    `given_up`: the most nats that a chosen token lies below the oracle's best, at token `given_up_at`; `differing`:
    share of tokens that are not the oracle's best; `median`, `ninety`: quantiles of |log-probability - oracle's| in
    nats, largest at token `moved_at`, absent where the endpoint gave no log-probabilities.
    """

    label: str
    tokens: int
    statistics: Mapping[str, float]
    limits: Mapping[str, float]
    given_up_at: int
    moved_at: int | None = None

    @property
    def failing(self) -> str:
        """The statistic that is furthest beyond its limit, "" when none is."""
        beyond = {k: v / self.limits[k] for k, v in self.statistics.items() if not v <= self.limits[k]}
        return max(beyond, key=beyond.__getitem__, default="")


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

    An answer is followed up to its first token outside the vocabulary. Raises ValueError for one longer than the
    model's positions.
    """
    profile = PROFILES[profile] if isinstance(profile, str) else profile
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint(model)
    # rounding points of bfloat16 lie far above the arithmetic of float32; those of float32 do not
    narrow = torch.float64 if profile.act_dtype == "float32" else torch.float32
    oracle = Model(checkpoint, dtype=torch.float64, device=device)
    expected = Model(checkpoint, dtype=narrow, device=device)
    seen, noise = [], []
    for index, answer in enumerate(_cut(a, checkpoint.config.vocab) for a in answers):
        exact = _rows(oracle, answer)
        seen.append((answer, exact))
        for replicate in range(replicates):
            rows = _rows(expected, answer, _rounding(profile, (seed, index, replicate), device)).double()
            noise.append(statistics(exact, rows.argmax(-1), _logprobs(rows, answer) - _logprobs(exact, answer)))
    limits = {k: FACTORS[k] * max((n[k] for n in noise), default=0.0) + FLOORS[k] for k in FACTORS}
    return tuple(_row(answer, exact, limits) for answer, exact in seen)


def matched(
    model: str | Path | Checkpoint,
    profile: str | Profile,
    answers: Sequence[WireAnswer],
    *,
    device: str = "cpu",
    seed: int = 0,
) -> Measure | None:
    """Which parameter of the model the answers' log-probabilities look wrong in, if any; None where there are none."""
    profile = PROFILES[profile] if isinstance(profile, str) else profile
    checkpoint = model if isinstance(model, Checkpoint) else Checkpoint(model)
    cut = [_cut(a, checkpoint.config.vocab) for a in answers if a.logprobs is not None and a.tokens]
    inside = [a for a in cut if 0 <= a.tokens[-1] < checkpoint.config.vocab]
    heard = [heard_logprobs(a.prompt, a.tokens, a.logprobs) for a in inside]
    return next(iter(compare_answers(checkpoint, profile, heard, device=device, seed=seed)), None)


def _cut(answer: WireAnswer, vocab: int) -> WireAnswer:
    """The answer up to its first token outside the vocabulary: nothing can be fed after that."""
    end = next((i + 1 for i, t in enumerate(answer.tokens) if not 0 <= t < vocab), len(answer.tokens))
    logprobs = None if answer.logprobs is None else answer.logprobs[:end]
    return replace(answer, tokens=answer.tokens[:end], logprobs=logprobs)


def statistics(oracle: torch.Tensor, chosen: torch.Tensor, delta: torch.Tensor | None) -> dict[str, float]:
    """The statistics of tokens `chosen` [n] under the oracle's logits [n, vocab], and of `delta` [n] in nats."""
    given_up = _given_up(oracle, chosen)
    found = {"given_up": float(given_up.max()), "differing": float((given_up > 0).double().mean())}
    if delta is not None:
        sizes = delta.double().abs().nan_to_num(nan=math.inf)
        found |= {"median": float(sizes.median()), "ninety": float(sizes.sort().values[int(0.9 * (len(sizes) - 1))])}
    return found


def _given_up(oracle: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[n]: nats between the oracle's best token and the chosen one; infinite for a token outside the vocabulary."""
    inside = (chosen >= 0) & (chosen < oracle.shape[-1])
    lost = oracle.amax(-1) - oracle.gather(-1, torch.where(inside, chosen, 0).unsqueeze(-1)).squeeze(-1)
    return torch.where(inside, lost, torch.inf)


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
        if operator == kept_states.OPERATOR and kept_states.claimed(profile):
            function = kept_states.in_calls(function, ())  # nobody shows its calls: the most that any makes
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


def _row(answer: WireAnswer, oracle: torch.Tensor, limits: Mapping[str, float]) -> Followed:
    tokens = torch.tensor(answer.tokens, device=oracle.device)
    delta = None
    if answer.logprobs is not None:
        delta = torch.tensor(answer.logprobs, dtype=torch.float64, device=oracle.device) - _logprobs(oracle, answer)
    found = statistics(oracle, tokens, delta)
    return Followed(
        answer.label,
        len(tokens),
        found,
        {k: limits[k] for k in found},
        int(_given_up(oracle, tokens).argmax()),
        None if delta is None else int(delta.abs().nan_to_num(nan=math.inf).argmax()),
    )
