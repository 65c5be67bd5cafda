"""Rotary embedding. The angle is a float32 position times a float32 frequency: that is the formula, not a shortcut."""

from __future__ import annotations

import functools
import math
import weakref

import torch
from torch import Tensor

from day0check.accelerated.ops.arithmetic import wide
from reference.config import Yarn


@functools.lru_cache(maxsize=64)
def frequencies(pairs: int, theta: float, yarn: Yarn | None) -> Tensor:
    """theta^(-i/pairs) for i < pairs, blended towards 1/factor of it by YaRN (Peng et al. 2023), float32 on the CPU.

    Rounded once from double precision: one ulp of a frequency shows at long positions.
    """
    plain = [theta ** (-i / pairs) for i in range(pairs)]
    if yarn is None:
        return torch.tensor(plain, dtype=torch.float32)
    dims = 2 * pairs

    def dimension(rotations: float) -> float:
        return dims * math.log(yarn.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(0, math.floor(dimension(yarn.beta_fast)))
    high = min(dims - 1, math.ceil(dimension(yarn.beta_slow)))
    span = (high - low) or 0.001
    slow = [min(1.0, max(0.0, (i - low) / span)) for i in range(pairs)]
    blended = [f / yarn.factor * s + f * (1.0 - s) for f, s in zip(plain, slow, strict=True)]
    return torch.tensor(blended, dtype=torch.float32)


def amplitude(yarn: Yarn | None) -> float:
    """Factor on cos and sin: the ratio of YaRN's two magnitude scales, 1 without it."""
    if yarn is None or yarn.factor <= 1.0:
        return 1.0
    log = 0.1 * math.log(yarn.factor)
    return (yarn.mscale * log + 1.0) / (yarn.mscale_all_dim * log + 1.0)


def rope_apply(
    x: Tensor,
    *,
    positions: Tensor,
    theta: float,
    layout: str,
    yarn: Yarn | None = None,
    sections: tuple[int, int, int] | None = None,
) -> Tensor:
    """Rotates all d channels of `x` [rows, heads, d] at `positions` [rows]; layouts none, half, interleaved. With
    `sections`, numbers of channel pairs, each of the three columns of `positions` [rows, 3] turns its own."""
    if layout == "none":
        return x
    a, pairs = wide(x), x.shape[-1] // 2
    cos, sin = turns(positions, pairs, theta, yarn, sections, a.dtype)
    if layout == "interleaved":
        even, odd = a.unflatten(-1, (pairs, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2).to(x.dtype)
    first, second = a.split(pairs, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


_latest: dict[tuple[object, ...], tuple[weakref.ref[Tensor], int, tuple[Tensor, Tensor]]] = {}
KEPT = 4  # kinds of rotation that a model has, more or less
KEPT_ROWS = 64  # rows of a decode step; tables of a prompt would be memory that grows with its length


def turns(
    positions: Tensor,
    pairs: int,
    theta: float,
    yarn: Yarn | None,
    sections: tuple[int, int, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Cosine and sine [rows, 1, pairs] of every angle, in `dtype`. The layers of a decode step ask with the same
    positions: the answer is kept until others come or their values change."""
    kind = (pairs, theta, yarn, sections, dtype)
    known = _latest.get(kind)
    if known is not None and known[0]() is positions and known[1] == positions._version:
        return known[2]
    inverse = frequencies(pairs, theta, yarn).to(positions.device)
    where = positions.to(torch.float32).unsqueeze(1)
    if sections is not None:
        where = torch.cat([where[..., axis].expand(-1, count) for axis, count in enumerate(sections)], 1)
    angle = where * inverse  # [rows, pairs]
    cos, sin = (f(angle).mul(amplitude(yarn)).to(dtype).unsqueeze(1) for f in (torch.cos, torch.sin))
    if len(positions) > KEPT_ROWS:
        return cos, sin
    while len(_latest) >= KEPT:
        _latest.pop(next(iter(_latest)), None)
    _latest[kind] = (weakref.ref(positions), positions._version, (cos, sin))
    return cos, sin
