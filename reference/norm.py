"""Norms over the last dimension (model.md 2.1). Inside at least float32."""

from __future__ import annotations

from torch import Tensor

from reference.rounding import Round, exact, wide


def rms_norm(x: Tensor, *, weight: Tensor | None = None, eps: float, round: Round = exact) -> Tensor:
    """w x / sqrt(mean(x^2) + eps): x [rows, ..., D], weight [D] or None -> the same shape and dtype as x.

    Zhang and Sennrich 2019. The point "normalised" is x / rms before the weight.
    """
    a, w = wide(x, weight)
    normalised = round("normalised", a / a.square().mean(-1, keepdim=True).add(eps).sqrt())
    return round("out", normalised if w is None else normalised * w).to(x.dtype)


def layer_norm(x: Tensor, *, weight: Tensor, bias: Tensor, eps: float, round: Round = exact) -> Tensor:
    """w (x - mean) / sqrt(var + eps) + b with the biased variance: x [rows, ..., D] -> the same (Ba et al. 2016)."""
    a, w, b = wide(x, weight, bias)
    centred = a - a.mean(-1, keepdim=True)
    y = centred / centred.square().mean(-1, keepdim=True).add(eps).sqrt() * w + b
    return round("out", y).to(x.dtype)


def l2_norm(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) in at least float32; eps is inside the root and is not the model's rms_norm_eps."""
    (a,) = wide(x)
    return a / a.square().sum(-1, keepdim=True).add(eps).sqrt()
