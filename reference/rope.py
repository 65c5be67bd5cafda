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


def rope_positions(ids: Tensor, *, media_pad: int, row_break: int) -> Tensor:
    """(temporal, height, width) position of every token of a request from its first on: ids int64 [rows] -> [rows, 3].

    A text token's three positions are equal. A run of media pads and row breaks is one image: with n the next text
    position where it begins, the token in column c of row r has (n, n + r, n + c); a break is the last token of its
    row. The text after an image goes on behind the largest of its positions (Qwen2-VL, Wang et al. 2024; here with
    breaks, whose column counts).
    """
    found, text, column, row, largest = [], 0, 0, 0, 0
    for token in ids.tolist():
        if token not in (media_pad, row_break):
            text = max(text, largest)
            found.append((text, text, text))
            text, column, row = text + 1, 0, 0
            continue
        found.append((text, text + row, text + column))
        largest = max(largest, *(1 + position for position in found[-1]))
        column += 1
        if token == row_break:
            column, row = 0, row + 1
    return torch.tensor(found, dtype=torch.int64, device=ids.device).reshape(-1, 3)


def apply_rope(
    x: Tensor,
    *,
    positions: Tensor,
    theta: float,
    layout: str,
    yarn: Yarn | None = None,
    sections: tuple[int, int, int] | None = None,
    round: Round = exact,
) -> Tensor:
    """x [rows, heads, d] rotated by its `positions` [rows] -> the same shape and dtype.

    "half" rotates channel pairs (i, i + d/2), "interleaved" pairs (2i, 2i + 1), "none" returns x:
    (a, b) -> (a cos - b sin, b cos + a sin). With `sections` positions are [rows, 3], and the first sections[0] pairs
    turn by the first of them, the next sections[1] by the second, the rest by the third (M-RoPE). Raises ValueError for
    another layout, an odd d, and sections that are not d / 2 pairs.
    """
    if layout == "none":
        return round("out", x)
    d = x.shape[-1]
    if layout not in ("half", "interleaved") or d % 2:
        raise ValueError(
            f"apply_rope: layout {layout!r} on {d} channels; needs 'none', 'half' or 'interleaved' and even d"
        )
    angle = _by_pair(positions, d // 2, sections) * frequencies(d, theta=theta, yarn=yarn).to(x.device)
    (w,) = wide(x)
    angle = angle.to(w.dtype)[:, None, :]
    factor = attention_factor(yarn)
    cos, sin = round("table", angle.cos() * factor), round("table", angle.sin() * factor)
    if layout == "half":
        a, b = w[..., : d // 2], w[..., d // 2 :]
        y = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    else:
        a, b = w[..., 0::2], w[..., 1::2]
        y = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return round("out", y).to(x.dtype)


def _by_pair(positions: Tensor, pairs: int, sections: tuple[int, int, int] | None) -> Tensor:
    """float32 [rows, pairs], or [rows, 1] where all pairs turn by one position."""
    if sections is None:
        return positions.to(torch.float32)[:, None]
    if sum(sections) != pairs or positions.shape[1:] != (3,):
        raise ValueError(
            f"apply_rope: sections {tuple(sections)} and positions {list(positions.shape)} for {pairs} channel pairs"
        )
    axis = torch.arange(3, device=positions.device).repeat_interleave(torch.tensor(sections, device=positions.device))
    return positions.to(torch.float32)[:, axis]
