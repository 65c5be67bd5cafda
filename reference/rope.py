"""Rotary position embedding with YaRN scaling (model.md 2.2; Su et al. 2021; Peng et al. 2023).

The angle is part of the formula: float32 position times float32 frequency, rounded to float32, for every dtype of x.
A float64 angle would differ from every real implementation by whole radians at a million positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.config import Yarn
from reference.rounding import Round, exact, wide


def frequencies(dim: int, *, theta: float, yarn: Yarn | None = None) -> Tensor:
    """float32 [dim / 2] radians per position: theta^(-2i/dim), with YaRN blended towards 1/factor of it.

    Computed in double precision and rounded once, so that no device and no torch build can change it. Code that raises
    theta to a power in float32 gets about a third of the frequencies one ulp off: 0.02 radians at a million positions.
    """
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if yarn is None:
        return torch.tensor(plain, dtype=torch.float32)
    low, high = _ramp_bounds(dim, theta, yarn)
    scaled_share = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(dim // 2)]
    blended = [f / yarn.factor * m + f * (1 - m) for f, m in zip(plain, scaled_share, strict=True)]
    return torch.tensor(blended, dtype=torch.float32)


def _ramp_bounds(dim: int, theta: float, yarn: Yarn) -> tuple[float, float]:
    """Pair numbers between which YaRN passes from unscaled to scaled frequencies."""

    def pair(rotations: float) -> float:
        return dim * math.log(yarn.original_positions / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(0, math.floor(pair(yarn.beta_fast)))
    high = min(dim - 1, math.ceil(pair(yarn.beta_slow)))
    return low, high if high != low else high + 0.001  # upstream's guard against an empty ramp


def attention_factor(yarn: Yarn | None) -> float:
    """Factor on cos and sin: mscale(mscale) / mscale(mscale_all_dim); 1 without YaRN and for DeepSeek-V3.2."""
    if yarn is None or yarn.factor <= 1:
        return 1.0

    def scaled(mscale: float) -> float:
        return 0.1 * mscale * math.log(yarn.factor) + 1.0

    return scaled(yarn.mscale) / scaled(yarn.mscale_all_dim)


def apply_rope(
    x: Tensor, *, positions: Tensor, theta: float, layout: str, yarn: Yarn | None = None, round: Round = exact
) -> Tensor:
    """x [rows, heads, d] rotated by its `positions` [rows] -> the same shape and dtype.

    "half" rotates channel pairs (i, i + d/2), "interleaved" pairs (2i, 2i + 1), "none" returns x:
    (a, b) -> (a cos - b sin, b cos + a sin). Raises ValueError for another layout or an odd d.
    """
    if layout == "none":
        return round("out", x)
    d = x.shape[-1]
    if layout not in ("half", "interleaved") or d % 2:
        raise ValueError(
            f"apply_rope: layout {layout!r} on {d} channels; needs 'none', 'half' or 'interleaved' and even d"
        )
    angle = positions.to(torch.float32)[:, None] * frequencies(d, theta=theta, yarn=yarn).to(x.device)
    (w,) = wide(x)
    angle = angle.to(w.dtype)[:, None, :]
    factor = attention_factor(yarn)
    cos, sin = angle.cos() * factor, angle.sin() * factor
    if layout == "half":
        a, b = w[..., : d // 2], w[..., d // 2 :]
        y = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = w[..., 0::2], w[..., 1::2]
        y = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return round("out", y).to(x.dtype)
