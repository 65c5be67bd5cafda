"""What the vision towers of single families add: LayerNorm, a plain projector (Kimi K2.5), and those of GLM-5.3."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from day0check.accelerated.ops.arithmetic import linear, product, wide
from day0check.accelerated.ops.spine import gated
from day0check.accelerated.ops.vision import Grids, budget_size, on_canvas, picture_of


def preprocess_in_budget(
    image: Tensor,
    *,
    patch: int,
    merge: int,
    min_tokens: int,
    max_tokens: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> tuple[Tensor, Tensor]:
    """Patches of `image` uint8 [height, width, channels] as RGB, alpha dropped: bicubic on bytes to the size that fits
    the budget of tokens, padded with zero bytes to the canvas, (x/255 - mean) / std.

    Returns pixels float32 [patches, 3*patch*patch], row-major, and the grid (1, h, w) int64.
    """
    size, grid = budget_size(
        image.shape[1], image.shape[0], patch=patch, merge=merge, min_tokens=min_tokens, max_tokens=max_tokens
    )
    pixels = on_canvas(picture_of(image).convert("RGB"), size, grid, patch, mean, std)
    return pixels.to(image.device), torch.tensor(grid, device=image.device)


def layer_norm(x: Tensor, *, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm over the last axis of `x` [rows, ..., D], float32 inside, one rounding."""
    a = wide(x)
    return F.layer_norm(a, a.shape[-1:], weight.to(a.dtype), bias.to(a.dtype), eps).to(x.dtype)


@functools.lru_cache(maxsize=16)
def _angles(grids: Grids, dim: int, theta: float) -> Tensor:
    """Angle of every pair of every patch, float32 [patches, dim / 2]: the first half by row, the second by column."""
    rate = torch.tensor([theta ** (-4.0 * i / dim) for i in range(dim // 4)], dtype=torch.float32)
    pieces = []
    for t, h, w in grids:
        row, column = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        both = [place.reshape(-1, 1).float() * rate for place in (row, column)]
        pieces.append(torch.cat(both, 1).repeat(t, 1))
    return torch.cat(pieces)


def rope_axial(x: Tensor, *, grids: Grids, theta: float) -> Tensor:
    """Rotary embedding of pairs (i, i + d/2) of `x` [patches, H, d]: i < d/4 by row, the others by column; restarting
    in every image, angles float32."""
    a = wide(x)
    angle = _angles(tuple(tuple(g) for g in grids), x.shape[-1], theta).to(x.device)
    cos, sin = angle.cos().to(a.dtype).unsqueeze(1), angle.sin().to(a.dtype).unsqueeze(1)
    first, second = a.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def gated_mlp(
    x: Tensor,
    *,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    limit: float,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """silu(min(g, limit)) clamp(u, -limit, limit) through `down`, g and u with biases; h and the result are rounded."""

    def project(weight: Tensor, bias: Tensor | None) -> Tensor:
        y = product(x, weight)
        return y if bias is None else y + bias.to(y.dtype)

    h = gated(project(gate, gate_bias), project(up, up_bias), "clamped", None, None, limit).to(x.dtype)
    return linear(h, weight=down, bias=down_bias)


def normed_gelu(x: Tensor, *, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """gelu(LayerNorm(x)), the erf form, over the last axis of `x` [tokens, M]; one rounding."""
    return F.gelu(layer_norm(wide(x), weight=weight, bias=bias, eps=eps)).to(x.dtype)


def project_plain(
    x: Tensor, *, w0: Tensor, w1: Tensor, bias0: Tensor | None = None, bias1: Tensor | None = None
) -> Tensor:
    """gelu(x W0^T + b0) W1^T + b1: `x` [tokens, in], `w0` [in, in], `w1` [D, in]; h and the result are rounded."""
    h = product(x, w0)
    h = F.gelu(h if bias0 is None else h + bias0.to(h.dtype)).to(x.dtype)
    return linear(h, weight=w1, bias=bias1)
