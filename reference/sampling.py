"""Choosing the next token. A draw depends on nothing but (logits, temperature, seed, position), so batch order and
batch size cannot change it."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.ordering import rank


def sample(logits: Tensor, *, temperature: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Token of each row: the largest logit at temperature 0 (the lowest id among equals, NaN behind every number),
    otherwise a draw from softmax(logits / temperature).

    The draw is the first id whose running sum of probabilities, in float64, exceeds uniform(seed, position) times
    their total. logits [rows, V], temperature [rows], seed and positions int64 [rows] -> int64 [rows]. Raises
    ValueError on a negative temperature or one that is not finite.
    """
    if not bool(((temperature >= 0) & torch.isfinite(temperature)).all()):
        raise ValueError("sample.token: every temperature must be finite and at least 0")
    ids = _greedy(logits)
    drawn = torch.nonzero(temperature > 0).flatten()
    if len(drawn):
        ids[drawn] = _draw(logits[drawn], temperature[drawn], uniform(seed[drawn], positions=positions[drawn]))
    return ids


def _greedy(logits: Tensor) -> Tensor:
    ranks = rank(logits)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.where(ranks == ranks.amax(-1, keepdim=True), ids, logits.shape[1]).amin(-1)


def _draw(logits: Tensor, temperature: Tensor, u: Tensor) -> Tensor:
    scaled = logits.to(torch.float64) / temperature.to(torch.float64)[:, None]
    scaled = scaled.masked_fill(torch.isnan(scaled), -torch.inf)
    top = scaled.amax(-1, keepdim=True)
    p = torch.where(scaled == top, 1.0, torch.exp(scaled - top).nan_to_num(0.0))  # also right for a top of +-inf
    total = p.cumsum(-1)
    ids = torch.searchsorted(total, u[:, None] * total[:, -1:], right=True)[:, 0]
    possible = torch.where(p > 0, torch.arange(p.shape[1], device=p.device), 0).amax(-1)
    return torch.minimum(ids, possible)  # u times the total may round up to the total


def uniform(seed: Tensor, *, positions: Tensor) -> Tensor:
    """float64 in [0, 1) of int64 (seed, position): the upper 53 bits, times 2^-53, of output number `position` of the
    generator SplitMix64 seeded with `seed` (Steele, Lea and Flood 2014). Integer products wrap modulo 2^64."""
    x = seed.long() + (positions.long() + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return _shift_right(x ^ _shift_right(x, 31), 11).to(torch.float64) * 2.0**-53


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch shifts int64 arithmetically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word
