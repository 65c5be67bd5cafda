"""Mixture of experts (model.md 2.6, 3): E experts, A active, k per row, L width of the routed input, I expert width.

A pair is one (row, choice), numbered row * k + choice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from reference.formats import (
    E8M0_NAN,
    FP8_BLOCK,
    MX_GROUP,
    e2m1_decode,
    e4m3_encode,
    fp8_columns_decode,
    mxfp4_unpack,
    rows_decode,
)
from reference.ordering import NEVER, best, rank
from reference.rounding import Round, exact, wide

SCORING: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": functools.partial(torch.softmax, dim=-1),
    "logit": lambda logits: logits,
}


def router_scores(
    x: Tensor, *, weight: Tensor, scoring: str, router_bias: Tensor | None = None, round: Round = exact
) -> Tensor:
    """The logits x W^T + b, or their sigmoid or softmax: x [rows, D], weight [E, D], router_bias [E] -> [rows, E], at
    least float32."""
    a, w, b = wide(x, weight, router_bias)
    if scoring not in SCORING:
        raise ValueError(f"moe.scores: scoring {scoring!r}; needs {', '.join(map(repr, SCORING))}")
    logits = a @ w.T
    return round("out", SCORING[scoring](logits if b is None else logits + b))


def route(
    scores: Tensor,
    *,
    bias: Tensor | None = None,
    k: int,
    groups: int,
    kept_groups: int,
    renormalise: bool,
    scale: float,
    weighting: str = "score",
) -> tuple[Tensor, Tensor]:
    """Experts of each row and their weights (DeepSeek-V3 routing).

    Chosen by scores + bias; with groups, a group is worth the sum of its two best and only `kept_groups` compete.
    Weights are the *unbiased* scores of the chosen, divided by (their sum + 1e-20) if `renormalise`, times `scale`.
    With `weighting` "softmax" they are the softmax of the chosen scores among themselves, times `scale` (gpt-oss).
    scores [rows, E], bias [E] -> ids int64 [rows, k] in ascending order, weights [rows, k] at least float32. Ties: the
    lower group, the lower expert. Raises ValueError when fewer than k experts can be chosen.
    """
    s, b = wide(scores, bias)
    experts = s.shape[1]
    if experts % groups or not 1 <= kept_groups <= groups or not 1 <= k <= experts // groups * kept_groups:
        raise ValueError(f"moe.route: {k} of {experts} experts in {kept_groups} of {groups} groups is impossible")
    biased = s if b is None else s + b
    ranks = rank(biased)
    if groups > 1:
        members = biased.unflatten(1, (groups, experts // groups))
        worth = members.topk(min(2, members.shape[-1]), dim=-1).values.sum(-1)
        kept = best(rank(worth), kept_groups).repeat_interleave(experts // groups, dim=1)
        ranks = ranks.masked_fill(~kept, NEVER)
    ids = torch.nonzero(best(ranks, k))[:, 1].reshape(-1, k)
    return ids, weights_of(s.gather(1, ids), renormalise=renormalise, weighting=weighting) * scale


def weights_of(chosen: Tensor, *, renormalise: bool, weighting: str = "score") -> Tensor:
    """The weights of experts with the scores `chosen` [rows, k], before the scale. Raises ValueError for another
    `weighting` than "score" and "softmax"."""
    if weighting == "softmax":
        return torch.softmax(chosen, dim=-1)
    if weighting != "score":
        raise ValueError(f"moe.route: weighting {weighting!r}; needs 'score' or 'softmax'")
    return chosen / (chosen.sum(-1, keepdim=True) + 1e-20) if renormalise else chosen


def dispatch(x: Tensor, *, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows repeated per choice and sorted by expert, pairs of one expert in pair order; id -1 goes nowhere.

    x [rows, L], ids int64 [rows, k] -> y [pairs, L], order [pairs] = pair numbers, active [A] = experts with a pair in
    ascending order, offsets [A + 1] = where their pairs begin in y. Raises ValueError on an id >= experts.
    """
    flat = ids.flatten().long()
    if flat.numel() and int(flat.max()) >= experts:
        raise ValueError(f"moe.dispatch: expert id {int(flat.max())} of {experts} experts")
    order = torch.sort(flat, stable=True).indices[int((flat < 0).sum()) :]
    active, counts = torch.unique_consecutive(flat[order], return_counts=True)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return x[order // max(1, ids.shape[1])], order, active, offsets


def activate(
    gate: Tensor,
    up: Tensor,
    *,
    activation: str,
    beta: float | None,
    linear_beta: float | None,
    limit: float | None,
    alpha: float | None = None,
) -> Tensor:
    """The gated activation of an MLP, in the dtype given (model.md 2.6).

    "silu": silu(g) u. "situ": beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta); beta None means 1,
    linear_beta None leaves u as it is. "clamped": silu(min(g, limit)) clamp(u, -limit, limit). "clamped_plus_one":
    g' sigmoid(alpha g') (clamp(u, -limit, limit) + 1) with g' = min(g, limit) (gpt-oss).
    """
    silu = torch.nn.functional.silu
    if activation == "silu":
        return silu(gate) * up
    if activation == "situ":
        bound = 1.0 if beta is None else beta
        linear = up if linear_beta is None else linear_beta * torch.tanh(up / linear_beta)
        return bound * torch.tanh(gate / bound) * torch.sigmoid(gate) * linear
    if activation == "clamped" and limit is not None:
        return silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    if activation == "clamped_plus_one" and limit is not None and alpha is not None:
        g = gate.clamp(max=limit)
        return g * torch.sigmoid(alpha * g) * (up.clamp(-limit, limit) + 1)
    raise ValueError(
        f"activation {activation!r} with limit {limit} and alpha {alpha}; needs 'silu', 'situ', 'clamped' with a "
        "limit, or 'clamped_plus_one' with a limit and alpha"
    )


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
    round: Round = exact,
) -> Tensor:
    """act(x gate^T, x up^T) down^T: x [rows, D], gate and up [I, D], down [D, I] -> [rows, D] in x's dtype; x may be
    E4M3 codes with `x_scale`, as in `reference.linear.linear`."""
    values, dtype = rows_decode(x, x_scale)
    a, wg, wu, wd = wide(values, gate, up, down)
    g, u = round("gate", a @ wg.T), round("up", a @ wu.T)
    h = round("h", activate(g, u, activation=activation, beta=beta, linear_beta=linear_beta, limit=limit))
    return round("out", h @ wd.T).to(dtype)


def experts(
    x: Tensor,
    *,
    offsets: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    w1_scale: Tensor | None = None,
    w3_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    b1: Tensor | None = None,
    b3: Tensor | None = None,
    b2: Tensor | None = None,
    activation: str,
    beta: float | None = None,
    linear_beta: float | None = None,
    limit: float | None = None,
    alpha: float | None = None,
    x_scale: Tensor | None = None,
    round: Round = exact,
) -> Tensor:
    """act(x w1^T + b1, x w3^T + b3) w2^T + b2 of active expert a on the pairs offsets[a]:offsets[a + 1].

    x [pairs, L], w1 (gate) and w3 (up) [A, I, L], w2 (down) [A, L, I], b1 and b3 [A, I], b2 [A, L], each bias or none
    -> [pairs, L] in x's dtype. A weight with a
    scale [A, rows, ceil(columns/128)] is an FP8 payload and is decoded exactly, one expert at a time. The inner points
    are called once per expert. x may be E4M3 codes with `x_scale`, as in `reference.linear.linear`.
    """
    values, dtype = rows_decode(x, x_scale)
    (a,) = wide(values)
    if any(w.dtype == torch.float64 for w in (w1, w3, w2)):
        a = a.to(torch.float64)
    y = a.new_zeros(x.shape[0], w2.shape[1])
    bounds = offsets.tolist()
    for e, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        own = a[start:end]
        gate, up, down = (
            w[e].to(a.dtype) if s is None else fp8_columns_decode(w[e], s[e], dtype=a.dtype)
            for w, s in ((w1, w1_scale), (w3, w3_scale), (w2, w2_scale))
        )
        g, u = round("gate", _plus(own @ gate.T, b1, e)), round("up", _plus(own @ up.T, b3, e))
        h = activate(g, u, activation=activation, beta=beta, linear_beta=linear_beta, limit=limit, alpha=alpha)
        y[start:end] = _plus(round("h", h) @ down.T, b2, e)
    return round("out", y).to(dtype)


def _plus(y: Tensor, biases: Tensor | None, expert: int) -> Tensor:
    return y if biases is None else y + biases[expert].to(y.dtype)


def combine(y: Tensor, *, order: Tensor, weights: Tensor, round: Round = exact) -> Tensor:
    """Sum of each row's expert outputs times their weights: y [pairs, L] in dispatch order, order [pairs] = pair
    numbers, weights [rows, k] -> [rows, L] in y's dtype; a pair that was not dispatched adds nothing."""
    a, w = wide(y, weights)
    by_pair = a.new_zeros(w.numel(), y.shape[1])  # summed by choice and not by index_add, whose order may vary
    by_pair[order] = a * w.flatten()[order, None]
    return round("out", by_pair.reshape(*w.shape, y.shape[1]).sum(1)).to(y.dtype)


# --------------------------------------------------------------------------------------------- MXFP4 -> block FP8

_HIGHEST, _LOWEST = 6, -13  # exponents that a code is shifted by inside its block; at -13 every code flushes to 0


def convert_experts(
    packed: Tensor,
    *,
    scale: Tensor,
    experts: Tensor,
    payload_out: Tensor | None = None,
    scale_out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """MXFP4 codes of the given experts as E4M3 payload with a power-of-two scale per output row and 128 columns.

    packed uint8 [E, N, K/2], scale uint8 [E, N, K/32], experts int64 [A] -> payload float8_e4m3fn [A, N, K],
    block_scale float32 [A, N, ceil(K/128)], inexact int64 [1] = elements whose payload * scale is not their MXFP4
    value. The scale is 2^(m - 127) with m = e_max - 6 over the groups that are not all zero (1 for a block of zeros):
    exact when their exponents lie within 14 of each other; below that elements flush towards zero, never overflow.
    With `payload_out` and `scale_out` the results are written there and are views of their first A entries.
    Raises ValueError on scale code 255.
    """
    count, rows, columns = len(experts), packed.shape[1], packed.shape[2] * 2
    blocks = -(-columns // FP8_BLOCK)
    device = packed.device
    if payload_out is None:
        payload_out = torch.empty(count, rows, columns, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    if scale_out is None:
        scale_out = torch.empty(count, rows, blocks, dtype=torch.float32, device=device)
    payload, block_scale = payload_out[:count], scale_out[:count]
    payload_table, inexact_table = _fold_tables(device)
    inexact = torch.zeros(1, dtype=torch.int64, device=device)
    for a, expert in enumerate(experts.tolist()):
        codes = mxfp4_unpack(packed[expert])
        shift, block_scale[a] = _block_exponents(codes, scale[expert], blocks, expert)
        entry = codes.long() + 16 * (shift - _LOWEST).repeat_interleave(MX_GROUP, dim=-1)
        payload.view(torch.uint8)[a] = payload_table[entry]
        inexact += inexact_table[entry].sum()
    return payload, block_scale, inexact


def _fold_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Payload byte and inexactness of every (shift, code): entry 16 * (shift - _LOWEST) + code."""
    shifts = torch.arange(_LOWEST, _HIGHEST + 1, dtype=torch.float64)
    value = (torch.exp2(shifts)[:, None] * e2m1_decode(torch.arange(16), torch.float64)).flatten()
    payload = e4m3_encode(value.to(torch.float32))
    inexact = payload.to(torch.float64) != value
    return payload.view(torch.uint8).to(device), inexact.to(device)


def _block_exponents(codes: Tensor, scale: Tensor, blocks: int, expert: int) -> tuple[Tensor, Tensor]:
    """Shift of each group [N, K/32] against its block's scale, and that scale, float32 [N, blocks]."""
    if bool((scale == E8M0_NAN).any()):
        row, group = torch.nonzero(scale == E8M0_NAN)[0].tolist()
        raise ValueError(f"moe.convert: scale code 255 (NaN) in expert {expert}, row {row}, group {group}")
    exponent = scale.long()
    filled = (codes.unflatten(-1, (-1, MX_GROUP)) & 7 != 0).any(-1)
    block = torch.arange(scale.shape[1], device=scale.device) // (FP8_BLOCK // MX_GROUP)
    highest = torch.full((scale.shape[0], blocks), -1, device=scale.device)
    highest = highest.scatter_reduce(1, block.expand_as(exponent), torch.where(filled, exponent, -1), "amax")
    m = torch.where(highest < 0, 127, highest - _HIGHEST)  # 2^(127 - 127) = 1 where all is zero
    shift = torch.where(filled, exponent - m[:, block], 0).clamp(min=_LOWEST)
    return shift, torch.exp2((m - 127).to(torch.float64)).to(torch.float32)
