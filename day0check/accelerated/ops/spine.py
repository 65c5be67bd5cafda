"""Input, norms, residual spine and MLPs of the fast path."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from day0check.accelerated.ops.arithmetic import (
    dequantised,
    linear,
    product,
    row_blocks,
    wide,
)

TANH_ONE = 20.0  # where tanh is 1 in float64 as well
FEW_ELEMENTS = 1 << 18  # of one source that a CPU works on at a time: it passes over them twice
FEW_TANH = 1 << 9  # values for which one call costs a CPU less than the quicker formula's five


def embed_tokens(ids: Tensor, *, weight: Tensor) -> Tensor:
    """Rows `ids` [rows] of the table `weight` [V, D]."""
    return weight.index_select(0, ids)


def splice_positions(ids: Tensor, *, media_pad: int, first: int) -> tuple[Tensor, Tensor]:
    """Rows of `ids` [rows] that hold a media pad, and the feature of each, counted on from `first`; int64 both."""
    at = (ids == media_pad).nonzero().squeeze(1)
    return at, torch.arange(first, first + at.numel(), device=ids.device)


def splice_merge(x: Tensor, *, features: Tensor, at: Tensor) -> Tensor:
    """`x` [rows, D] with rows `at` [m] replaced by `features` [m, D]; a new tensor."""
    return x.index_copy(0, at, features.to(x.dtype))


def rms_norm(x: Tensor, *, weight: Tensor | None = None, eps: float) -> Tensor:
    """w x / rms(x) over the last axis, multiplied in float32 and rounded once (form "fused")."""
    if _one_vector(x) and eps > 0:
        flat = x.reshape(-1)
        y = x * (1.0 / math.sqrt(float(flat.dot(flat)) / flat.numel() + eps))
        return y if weight is None else y.mul_(weight.to(y.dtype))
    if x.device.type != "cpu" or x.numel() <= FEW_ELEMENTS:
        return _normed(wide(x), weight, eps).to(x.dtype)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for block in row_blocks(x.shape[0], x[0].numel(), limit=FEW_ELEMENTS):
        a = wide(x[block])
        if a.dtype == out.dtype:  # straight into its place
            _normed(a, weight, eps, out[block])
        else:
            out[block] = _normed(a, weight, eps)
    return out


def _one_vector(x: Tensor) -> bool:
    """Whether `x` [..., D] is one float32 vector on a CPU, as in a decode step: a factor that is a plain number then
    saves most of the operations."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() == x.shape[-1] > 0


def _normed(x: Tensor, weight: Tensor | None, eps: float, out: Tensor | None = None) -> Tensor:
    y = torch.mul(x, _inverse_rms(x, eps), out=out)
    return y if weight is None else y.mul_(weight.to(x.dtype))


def residual_add(x: Tensor, *, y: Tensor) -> Tensor:
    """x + y, both [rows, D], one rounding."""
    return torch.add(x, y)


def residual_mix(sources: Tensor, *, norm_weight: Tensor, proj: Tensor, eps: float) -> Tensor:
    """Softmax over sources of proj . (w v / rms v), applied to the raw `sources` [rows, n, D]; float32 inside.

    The norm's weight folds into the projection. On a CPU rows are worked on while they are in its caches.
    """
    rows, n, width = sources.shape
    dtype = wide(sources[:0]).dtype
    direction = norm_weight.to(dtype) * proj.reshape(-1).to(dtype)
    if rows == 1 and sources.dtype == dtype and sources.device.type == "cpu":
        v = sources[0]
        logits = torch.mv(v, direction).mul_(_inverse_rms(v, eps).squeeze(-1))
        return torch.mv(v.T, torch.softmax(logits, -1)).unsqueeze(0)
    if sources.device.type != "cpu" or rows * width <= FEW_ELEMENTS // 16:
        v = wide(sources)
        logits = (v @ direction).mul_(_inverse_rms(v, eps).squeeze(-1))
        return torch.bmm(torch.softmax(logits, -1).unsqueeze(1), v).squeeze(1).to(sources.dtype)
    out = sources.new_empty(rows, width)
    for block in row_blocks(rows, width, limit=FEW_ELEMENTS):
        parts = [wide(sources[block, i]) for i in range(n)]
        logits = torch.stack([torch.mv(v, direction).mul_(_inverse_rms(v, eps).squeeze(-1)) for v in parts], -1)
        share = torch.softmax(logits, -1).unsqueeze(-1)
        mixed = torch.mul(parts[0], share[:, 0], out=out[block] if out.dtype == dtype else None)
        for i in range(1, n):
            mixed.addcmul_(parts[i], share[:, i])
        if out.dtype != dtype:
            out[block] = mixed
    return out


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean x^2 + eps) over the last axis of a wide `x`, kept as an axis."""
    if x.device.type != "cpu" or x.dtype == torch.float64:
        return torch.rsqrt(torch.mean(torch.square(x), -1, keepdim=True) + eps)
    # one pass and no square of its own; float32 squares would overflow in the mean as well
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().mul_(1 / x.shape[-1]).add_(eps).rsqrt_()


def residual_store(bank: Tensor, *, value: Tensor, slot: int) -> None:
    """Writes `value` [rows, D] into slot `slot` of `bank` [n, rows, D]."""
    bank[slot].copy_(value)


def residual_coefficients(
    streams: Tensor, *, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """mHC coefficients of `streams` [rows, N, D]: pre [rows, N], post [rows, N], comb [rows, N, N] (in, out)."""
    rows, n, _ = streams.shape
    flat = wide(streams).reshape(rows, -1)
    z = product(flat, fn) * torch.rsqrt(torch.mean(torch.square(flat), -1, keepdim=True) + eps)
    factors = torch.cat([factor.expand(count) for factor, count in zip(scale, (n, n, n * n), strict=True)])
    z = z * factors.to(z.dtype) + base.to(z.dtype)
    pre = torch.sigmoid(z[:, :n]) + hc_eps
    post = 2 * torch.sigmoid(z[:, n : 2 * n])
    comb = torch.softmax(z[:, 2 * n :].reshape(rows, n, n), -1) + hc_eps
    comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(2, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(1, keepdim=True) + hc_eps)
    return pre, post, comb


def residual_collapse(streams: Tensor, *, pre: Tensor) -> Tensor:
    """sum_n pre_n X_n: `streams` [rows, N, D], `pre` [rows, N] to [rows, D]."""
    x = wide(streams)
    return torch.bmm(pre.to(x.dtype).unsqueeze(1), x).squeeze(1).to(streams.dtype)


def residual_update(streams: Tensor, *, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X_new[j] = post_j f + sum_i comb[i, j] X_i: `streams` [rows, N, D], `output` [rows, D]."""
    x = wide(streams)
    carried = torch.bmm(comb.to(x.dtype).transpose(1, 2), x)
    return torch.addcmul(carried, post.to(x.dtype).unsqueeze(-1), wide(output).unsqueeze(1)).to(streams.dtype)


def _tanh(x: Tensor) -> Tensor:
    """tanh of `x`, which is overwritten. A CPU has it in half the time from e^2x - 1, exact to two units."""
    if x.device.type != "cpu" or x.numel() <= FEW_TANH or torch.compiler.is_compiling():
        return torch.tanh(x)
    e = x.clamp_(-TANH_ONE, TANH_ONE).mul_(2).expm1_()
    return e.div_(e + 2)


def gated(
    g: Tensor,
    u: Tensor,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
    limit: float | None,
    alpha: float | None = None,
) -> Tensor:
    """The gated activation of gate `g` and up `u`, both wide. Raises ValueError for an unknown `activation`."""
    if activation == "silu":
        return F.silu(g) * u
    if activation == "situ":
        b = 1.0 if beta is None else beta
        bounded = u if linear_beta is None else _tanh(u / linear_beta).mul_(linear_beta)
        return _tanh(g / b).mul_(b).mul_(torch.sigmoid(g)).mul_(bounded)
    if activation == "clamped":
        return F.silu(g.clamp(max=limit)) * u.clamp(-limit, limit)
    if activation == "clamped_plus_one":
        below = g.clamp(max=limit)
        return (u.clamp(-limit, limit) + 1) * (below * torch.sigmoid(alpha * below))
    raise ValueError(f"activation {activation!r} is none of silu, situ, clamped, clamped_plus_one")


def mlp(
    x: Tensor,
    *,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str,
    beta: float | None = None,
    linear_beta: float | None = None,
    limit: float | None = None,
    x_scale: Tensor | None = None,
) -> Tensor:
    """act(x gate^T, x up^T) down^T with `x` [rows, D]; only h and the result are rounded (form "fused"). `x_scale` as
    in `linear`."""
    dtype = x.dtype if x_scale is None else down.dtype
    x = x if x_scale is None else dequantised(x, x_scale)
    h = gated(product(x, gate), product(x, up), activation, beta, linear_beta, limit).to(dtype)
    return linear(h, weight=down)
