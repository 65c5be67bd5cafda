"""Output of the fast path: logits and the choice of a token."""

from __future__ import annotations

import torch
from torch import Tensor

from day0check.accelerated.ops.arithmetic import dequantised, product
from day0check.accelerated.ops.index import ordered


def logits(x: Tensor, *, weight: Tensor, bias: Tensor | None = None, x_scale: Tensor | None = None) -> Tensor:
    """x W^T in float32: `x` [rows, D], or its E4M3 codes with `x_scale` [rows, ceil(D/128)]; `weight` [V, D]."""
    y = product(x if x_scale is None else dequantised(x, x_scale), weight)
    return y if bias is None else y + bias.to(y.dtype)


def _signed(pattern: int) -> int:
    """A 64-bit pattern as the int64 that holds it."""
    return pattern - (1 << 64) if pattern >> 63 else pattern


def _shifted_down(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seed: Tensor, positions: Tensor) -> Tensor:
    """A number in [0, 1) for each int64 (seed, position), float64: the upper 53 bits of output number `position` of
    SplitMix64 (Steele, Lea, Flood 2014) seeded with `seed`; int64 products wrap."""
    x = seed + (positions + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted_down(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted_down(x, 27)) * _signed(0x94D049BB133111EB)
    return _shifted_down(x ^ _shifted_down(x, 31), 11).double() * 2.0**-53


def sample(logits: Tensor, *, temperature: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """One id for each row of `logits` [rows, V]: temperature 0 takes the largest logit, the lowest id among equal ones,
    NaN after every number; otherwise softmax(logits / temperature) is inverted at `uniform(seed, positions)`."""
    greedy = ordered(logits, torch.arange(logits.shape[1], device=logits.device)).argmax(-1)
    warm = temperature > 0
    if logits.device.type == "cpu" and not bool(warm.any()):
        return greedy
    heat = torch.where(warm, temperature, 1.0).double().unsqueeze(-1)
    share = torch.softmax(logits.double().nan_to_num(nan=float("-inf")) / heat, -1)
    cumulated = share.cumsum(-1)
    mark = uniform(seed, positions).unsqueeze(-1) * cumulated[:, -1:]
    drawn = torch.searchsorted(cumulated, mark, right=True).squeeze(-1)
    last = torch.where(share > 0, torch.arange(logits.shape[1], device=logits.device), 0).amax(-1)
    return torch.where(warm, torch.minimum(drawn, last), greedy)  # the mark may round up to the whole
