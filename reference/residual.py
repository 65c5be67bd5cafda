"""The residual spine: plain, attention residuals, multi-stream mHC (model.md 2.7). D hidden, n sources, N streams."""

from __future__ import annotations

import torch
from torch import Tensor

from reference.rounding import Round, exact, wide


def add(x: Tensor, *, y: Tensor, round: Round = exact) -> Tensor:
    """x + y with one rounding: both [rows, D] -> the same in x's dtype."""
    a, b = wide(x, y)
    return round("out", a + b).to(x.dtype)


def attention_mix(sources: Tensor, *, norm_weight: Tensor, proj: Tensor, eps: float, round: Round = exact) -> Tensor:
    """sum_i p_i v_i of the *raw* sources with p = softmax_i(proj . (w v_i / rms(v_i))).

    sources [rows, n, D], norm_weight and proj [D] -> [rows, D] in the sources' dtype (attention residuals).
    """
    v, w, a = wide(sources, norm_weight, proj)
    normed = w * v / v.square().mean(-1, keepdim=True).add(eps).sqrt()
    p = round("p", torch.softmax(normed @ a, dim=-1))
    return round("out", (p[..., None] * v).sum(1)).to(sources.dtype)


def store(bank: Tensor, *, value: Tensor, slot: int) -> None:
    """Writes value [rows, D] into the first rows of slot `slot` of bank [n, capacity, D], in place."""
    bank[slot, : value.shape[0]] = value.to(bank.dtype)


def stored(bank: Tensor, *, value: Tensor, slot: int) -> tuple[Tensor, Tensor]:
    """(what is now in the slot, what must be there) after `store` with the same arguments."""
    return bank[slot, : value.shape[0]], value.to(bank.dtype)


def stream_coefficients(
    streams: Tensor,
    *,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    eps: float,
    hc_eps: float,
    iterations: int,
    round: Round = exact,
) -> tuple[Tensor, Tensor, Tensor]:
    """mHC coefficients of one sublayer from z = fn RMSnorm(flat streams), split N, N, N^2:

        pre = sigmoid(z s0 + b) + hc_eps,   post = 2 sigmoid(z s1 + b),
        comb[in, out] = softmax over out of (z s2 + b), + hc_eps, then Sinkhorn: columns (sum over in) first, then
        (iterations - 1) x (rows, columns), each divided by (sum + hc_eps)

    streams [rows, N, D], fn [N(2 + N), N*D], base [N(2 + N)], scale [3] -> pre [rows, N], post [rows, N],
    comb [rows, N, N], all at least float32. `eps` is of the norm (rms_norm_eps), not hc_eps.
    """
    n = streams.shape[1]
    x, w, b, s = wide(streams, fn, base, scale)
    flat = x.flatten(1)
    z = flat / flat.square().mean(-1, keepdim=True).add(eps).sqrt() @ w.T
    pre = torch.sigmoid(z[:, :n] * s[0] + b[:n]) + hc_eps
    post = 2 * torch.sigmoid(z[:, n : 2 * n] * s[1] + b[n : 2 * n])
    comb = (z[:, 2 * n :] * s[2] + b[2 * n :]).unflatten(1, (n, n))
    comb = torch.softmax(comb, dim=-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return round("out", pre), round("out", post), round("out", comb)


def collapse_streams(streams: Tensor, *, pre: Tensor, round: Round = exact) -> Tensor:
    """The input of a sublayer, sum_n pre_n X_n: streams [rows, N, D], pre [rows, N] -> [rows, D]."""
    x, p = wide(streams, pre)
    return round("out", torch.einsum("rn,rnd->rd", p, x)).to(streams.dtype)


def update_streams(streams: Tensor, *, output: Tensor, post: Tensor, comb: Tensor, round: Round = exact) -> Tensor:
    """X_new[j] = post_j f + sum_i comb[i, j] X_i: streams [rows, N, D], output f [rows, D], post [rows, N],
    comb [rows, N, N] (in, out) -> [rows, N, D] in the streams' dtype."""
    x, f, p, c = wide(streams, output, post, comb)
    y = p[..., None] * f[:, None] + torch.einsum("rij,rid->rjd", c, x)
    return round("out", y).to(streams.dtype)
