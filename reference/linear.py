"""Embedding and linear layers: y = x W^T with wide sums. D in, O out features, H heads."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.formats import rows_decode
from reference.rounding import Round, exact, wide


def embed(ids: Tensor, *, weight: Tensor) -> Tensor:
    """Rows `ids` [rows] of the table `weight` [V, D] -> [rows, D], bytes unchanged. Raises IndexError beyond V."""
    return weight[ids]


def linear(
    x: Tensor, *, weight: Tensor, bias: Tensor | None = None, x_scale: Tensor | None = None, round: Round = exact
) -> Tensor:
    """x W^T (+ bias), summed in at least float32: x [rows, in], weight [out, in] -> [rows, out] in x's dtype. With
    `x_scale` [rows, ceil(in/128)], x holds E4M3 codes of values code * scale, and the result is bfloat16."""
    values, dtype = rows_decode(x, x_scale)
    return _product(values, weight, bias, round).to(dtype)


def linear_float32(
    x: Tensor, *, weight: Tensor, bias: Tensor | None = None, x_scale: Tensor | None = None, round: Round = exact
) -> Tensor:
    """`linear` whose result stays in at least float32 (logits)."""
    return _product(rows_decode(x, x_scale)[0], weight, bias, round)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, round: Round) -> Tensor:
    x, weight, bias = wide(x, weight, bias)
    y = x @ weight.T
    return round("out", y if bias is None else y + bias)


def per_head(x: Tensor, *, weight: Tensor, round: Round = exact) -> Tensor:
    """A matrix per head: x [rows, H, in], weight [H, in, out] -> [rows, H, out] in x's dtype (model.md 2.3)."""
    a, w = wide(x, weight)
    return round("out", torch.einsum("rhi,hio->rho", a, w)).to(x.dtype)
