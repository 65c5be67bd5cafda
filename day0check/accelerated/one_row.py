"""The sublayers of a decode step of one row as plain formulas, each meant to be one graph of a compiler.

What the operators of `ops/` do one after the other for [rows, ...] is written here for vectors, float32, so that a
compiler fuses everything between two reads of a cache: no result of an operator is kept, and no expert is decoded into
memory. Nobody can look inside; `one_row_step` uses them where nobody does. Products of a matrix and a vector are sums,
which a compiler makes one loop of.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from day0check.accelerated.ops.kda import L2_EPS
from day0check.accelerated.ops.spine import gated

KEPT_BITS, EXPONENT_AT = 0x0F, 23  # of a code of four bits; where a float32 has its exponent

Spine = tuple[Tensor, Tensor, Tensor]  # see `entered`
Mixed = tuple[Tensor, Tensor]  # the weight of a mix's norm and its projection, both [D]
Activation = tuple[str, float | None, float | None, float | None]  # kind, beta, linear beta, limit


def times(weight: Tensor, x: Tensor) -> Tensor:
    """W x: `weight` [..., N, K], `x` [K] or [..., 1, K], result [..., N]."""
    return (weight * x).sum(-1)


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """w x / rms(x) over the last axis."""
    y = x * torch.rsqrt(torch.mean(x * x, -1, keepdim=True) + eps)
    return y if weight is None else y * weight


def entered(spine: Spine, mix: Mixed, norm: Tensor, eps: float) -> Tensor:
    """The normed input [D] of a sublayer: the softmax mix of the running sum and the frozen blocks, normed.

    `spine`: the running sum [D], blocks [n, D], zeros where there is none yet, and what is added to their logits [n],
    0 or, where there is no block, -inf.
    """
    partial, bank, shut = spine
    direction = mix[0] * mix[1]

    def logit(v: Tensor) -> Tensor:
        return (v * direction).sum(-1) * torch.rsqrt(torch.mean(v * v, -1) + eps)

    first, others = logit(partial), logit(bank) + shut
    top = torch.maximum(first, others.amax())
    own, shares = torch.exp(first - top), torch.exp(others - top)
    mixed = (own * partial + (shares.unsqueeze(-1) * bank).sum(0)) / (own + shares.sum())
    return normed(mixed, norm, eps)


def kda(
    spine: Spine,
    mix: Mixed,
    norm: Tensor,
    projections: tuple[Tensor, ...],
    decay: tuple[Tensor, Tensor | None, Tensor, Tensor],
    gate: tuple[Tensor, ...],
    conv: Tensor,
    out: tuple[Tensor, Tensor],
    conv_state: Tensor,
    state: Tensor,
    lower_bound: float | None,
    eps: float,
) -> tuple[Tensor, ...]:
    """Kimi delta attention of one token, [D], and what is beside.

    `projections` q, k, v and beta; `decay` f_a, f_b, a_log, dt_bias; `out` norm and output. `conv_state` [W-1, C] and
    `state` [H, dk, dv] are brought up to date in place.
    """
    x = entered(spine, mix, norm, eps)
    heads, dim, _ = state.shape
    window = torch.cat((conv_state, torch.cat([times(w, x) for w in projections[:3]]).unsqueeze(0)))
    mixed = F.silu((window * conv.T).sum(0)).view(3, heads, dim)
    conv_state.copy_(window[1:])
    unit = mixed[:2] * torch.rsqrt((mixed[:2] * mixed[:2]).sum(-1, keepdim=True) + L2_EPS)
    q, k, v = unit[0] * dim**-0.5, unit[1], mixed[2]
    f_a, f_b, a_log, dt_bias = decay
    f = times(f_a, x)
    f = f.repeat_interleave(dim) if f_b is None else times(f_b, f)
    rate, biased = torch.exp(a_log).unsqueeze(-1), f.view(heads, dim) + dt_bias
    g = lower_bound * torch.sigmoid(rate * biased) if lower_bound is not None else -rate * F.softplus(biased)
    decayed = state * torch.exp(g).unsqueeze(-1)
    missing = (v - (k.unsqueeze(-1) * decayed).sum(1)) * torch.sigmoid(times(projections[3], x)).unsqueeze(-1)
    fresh = decayed + k.unsqueeze(-1) * missing.unsqueeze(1)
    state.copy_(fresh)
    y = normed((q.unsqueeze(-1) * fresh).sum(1), out[0], eps).flatten()
    open_ = x
    for weight in gate:
        open_ = times(weight, open_)
    y = y * torch.sigmoid(open_)
    return times(out[1], y), x, q, k, y


def rotated(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """`x` [heads, d] turned by the angles whose cosines and sines [1, d/2] are given."""
    if layout == "none" or x.shape[-1] == 0:
        return x
    if layout == "interleaved":
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def mla_front(
    spine: Spine,
    mix: Mixed,
    norm: Tensor,
    query: tuple[Tensor | None, Tensor | None, Tensor],
    latent: tuple[Tensor, Tensor],
    absorb: Tensor,
    gate: Tensor | None,
    index: tuple[Tensor, ...] | None,
    turns: tuple[Tensor, Tensor],
    index_turns: tuple[Tensor, Tensor],
    layouts: tuple[str, str],
    eps: tuple[float, float, float],
    index_rope: int,
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor, Tensor] | None, tuple[Tensor, ...]]:
    """Latent attention of one token up to its caches: the absorbed query [H, c + dr], the row [c + dr] to be kept, the
    open gate [H dv], and of a layer with an `index` (query, weights, key, norm's weight and bias) its queries [HI, dI],
    weights [HI] and the key [dI] to be kept; at last what is beside. `query`: down, norm, up. `eps`: of the input,
    latents, index keys."""
    x = entered(spine, mix, norm, eps[0])
    down, query_norm, up = query
    inner = x if down is None else normed(times(down, x), query_norm, eps[1])
    heads, nope, width = absorb.shape
    q = times(up, inner).view(heads, -1)
    compressed = times(latent[0], x)
    kept = torch.cat(
        (normed(compressed[:width], latent[1], eps[1]), rotated(compressed[width:].unsqueeze(0), *turns, layouts[0])[0])
    )
    folded = (q[:, :nope].unsqueeze(-1) * absorb).sum(1)
    absorbed = torch.cat((folded, rotated(q[:, nope:], *turns, layouts[0])), -1)
    opened = None if gate is None else torch.sigmoid(times(gate, x))
    if index is None:
        return absorbed, kept, opened, None, (x, inner)
    index_query, weights, key_weight, norm_weight, norm_bias = index
    key = F.layer_norm(times(key_weight, x), norm_weight.shape, norm_weight, norm_bias, eps[2]).unsqueeze(0)
    queries = times(index_query, inner).view(weights.shape[0], -1)
    queries, key = (
        torch.cat((rotated(part[:, :index_rope], *index_turns, layouts[1]), part[:, index_rope:]), -1)
        for part in (queries, key)
    )
    shares = times(weights, x) * (weights.shape[0] ** -0.5 * queries.shape[1] ** -0.5)
    return absorbed, kept, opened, (queries, shares, key[0]), (x, inner)


def mla_back(z: Tensor, value: Tensor, opened: Tensor | None, output: Tensor) -> tuple[Tensor, Tensor]:
    """What attention found in the latents, `z` [H, c], as the sublayer's result [D], and what is beside."""
    y = (z.unsqueeze(-1) * value).sum(1).flatten()
    y = y if opened is None else y * opened
    return times(output, y), y


def dense(
    spine: Spine,
    mix: Mixed,
    norm: Tensor,
    mlp: tuple[Tensor, Tensor, Tensor],
    activation: Activation,
    eps: float,
) -> tuple[Tensor, ...]:
    """The dense MLP of one token, [D], and what is beside; `mlp` gate, up, down."""
    x = entered(spine, mix, norm, eps)
    return *_mlp(x, mlp, activation), x


def _mlp(x: Tensor, mlp: tuple[Tensor, Tensor, Tensor], activation: Activation) -> tuple[Tensor, Tensor]:
    gate, up, down = mlp
    h = gated(times(gate, x), times(up, x), *activation)
    return times(down, h), h


def moe(
    spine: Spine,
    mix: Mixed,
    norm: Tensor,
    router: tuple[Tensor, Tensor | None],
    latent: tuple[Tensor | None, Tensor | None, Tensor | None],
    experts: tuple[tuple[Tensor, Tensor | None], ...],
    shared: tuple[Tensor, Tensor, Tensor] | None,
    routing: tuple[int, int, int, bool, float, str],
    activation: Activation,
    eps: float,
) -> tuple[Tensor, ...]:
    """Routed experts and the shared one for one token, [D], and what is beside.

    `router` weight and bias; `latent` down, norm, up; `experts` w1, w3, w2, each with its scale where it is packed;
    `routing` k, groups, kept groups, renormalise, scale, scoring.
    """
    x = entered(spine, mix, norm, eps)
    ids, weights = routed(times(router[0], x), router[1], routing)
    down, inner_norm, up = latent
    inner = x if down is None else times(down, x)
    w1, w3, w2 = experts
    own = halves(inner.unsqueeze(0))
    h = gated(by_expert(w1, ids, *own), by_expert(w3, ids, *own), *activation)
    own_h = halves(h)
    y = (weights.unsqueeze(-1) * by_expert(w2, ids, *own_h)).sum(0)
    if inner_norm is not None:
        y = normed(y, inner_norm, eps)
    summed = y
    y = y if up is None else times(up, y)
    if shared is None:
        return y, x, ids, weights, h, summed, own, own_h
    s, shared_h = _mlp(x, shared, activation)
    return y + s, x, ids, weights, h, summed, own, own_h, shared_h


def routed(
    logits: Tensor, bias: Tensor | None, routing: tuple[int, int, int, bool, float, str]
) -> tuple[Tensor, Tensor]:
    """Experts int64 [k] of the router's `logits` [E], and their weights [k], as `ops.experts.route` chooses them."""
    k, groups, kept_groups, renormalise, scale, scoring = routing
    scores = torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, -1)
    biased = scores if bias is None else scores + bias
    if kept_groups < groups:
        grouped = biased.view(groups, -1)
        two_best = torch.where(_rank(grouped) < 2, grouped, 0.0).sum(-1)
        kept = (_rank(two_best) < kept_groups).unsqueeze(-1)
        biased = torch.where(kept, grouped, float("-inf")).flatten()
    place, number = _rank(biased), torch.arange(biased.shape[0], device=biased.device)
    wanted = torch.arange(k, device=biased.device).unsqueeze(-1)
    # a NaN has no rank: without the clamp it would name an expert that is not there
    ids = torch.where(place == wanted, number, 0).sum(-1).clamp(0, biased.shape[0] - 1)
    weights = torch.where(place == wanted, scores, 0.0).sum(-1)
    if renormalise:
        weights = weights / (weights.sum() + 1e-20)
    return ids, weights * scale


def _rank(values: Tensor) -> Tensor:
    """How many of the last axis of `values` come before each: larger ones, and equal ones with a lower number."""
    number = torch.arange(values.shape[-1], device=values.device)
    mine, other = values.unsqueeze(-1), values.unsqueeze(-2)
    return ((other > mine) | ((other == mine) & (number < number.unsqueeze(-1)))).sum(-1)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The even and the odd columns of `x` [n, K], as a byte of two codes wants them."""
    return x[:, ::2].clone(), x[:, 1::2].clone()


def by_expert(matrix: tuple[Tensor, Tensor | None], ids: Tensor, even: Tensor, odd: Tensor) -> Tensor:
    """W_e x for the experts `ids` [k]: the halves [k, K/2] of a vector for each, or [1, K/2] of one; result [k, N].
    `matrix`: plain [E, N, K], or codes of MXFP4 [E, N, K/2] with E8M0 exponents [E, N, K/32], read where they lie."""
    weight, scale = matrix
    if scale is None:
        chosen = weight[ids]
        return times(chosen[:, :, ::2], even.unsqueeze(1)) + times(chosen[:, :, 1::2], odd.unsqueeze(1))
    # int32: a CPU has shifts and masks for it, and takes many times as long over bytes
    codes = weight[ids].to(torch.int32).unflatten(-1, (scale.shape[-1], -1))  # [k, N, groups, 16]
    even, odd = (half.view(half.shape[0], 1, *codes.shape[2:]) for half in (even, odd))
    low, high = _value(codes & KEPT_BITS), _value(codes >> 4)
    power = (scale[ids].to(torch.int32) << EXPONENT_AT).view(torch.float32)  # 2^(e - 127), e from 1 to 254
    return ((low * even + high * odd) * power.unsqueeze(-1)).sum((-2, -1))


def _value(code: Tensor) -> Tensor:
    """What codes of E2M1 int32 mean, 0 to 15: three pieces of a line are 0, 0.5, 1, 1.5, 2, 3, 4, 6 at 0 to 7."""
    size = (code & 7).to(torch.float32)
    size = torch.maximum(torch.maximum(0.5 * size, size - 2.0), 2.0 * size - 8.0)
    return size * (1.0 - 0.25 * (code & 8).to(torch.float32))
