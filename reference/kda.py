"""Kimi delta attention (model.md 2.5). H heads, dk and dv key and value dims, C conv channels, W conv width.

Requests are ragged: rows offsets[b]:offsets[b + 1] belong to request b; rows outside all requests get zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from reference.norm import l2_norm
from reference.rounding import Round, exact, wide

BLOCK_ELEMENTS = 2**24  # largest intermediate of a block of heads


def conv(x: Tensor, *, weight: Tensor, state: Tensor, offsets: Tensor, round: Round = exact) -> tuple[Tensor, Tensor]:
    """SiLU of a causal depthwise convolution over [state | rows] of each request, and the new state.

    x [rows, C], weight [C, W] (the last column is the current token), state [batch, W-1, C] (raw rows, zeros when
    fresh), offsets int64 [batch + 1] -> y [rows, C] in x's dtype, new_state [batch, W-1, C] = the last W-1 raw rows.
    """
    past = weight.shape[1] - 1
    raw, w, before = wide(x, weight, state)
    extended, at, ends = _with_state(raw, before, offsets, past)
    y = raw.new_zeros(x.shape)
    inside = torch.nonzero(at >= 0).flatten()
    for tap in range(past + 1):
        y[inside] += w[:, tap] * extended[at[inside] - past + tap]
    y = torch.nn.functional.silu(round("conv", y))
    last = ends[:, None] + torch.arange(-past, 0, device=x.device)
    return round("out", y).to(x.dtype), extended[last].to(state.dtype)


def _with_state(x: Tensor, state: Tensor, offsets: Tensor, past: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every request's rows laid behind its state; where each row lies there (-1: nowhere), where each request ends."""
    batch, number = state.shape[0], torch.arange(x.shape[0], device=x.device)
    request = torch.searchsorted(offsets, number, right=True) - 1
    inside = (request >= 0) & (request < batch)
    at = torch.where(inside, number - offsets[0] + (request + 1) * past, -1)
    starts = offsets[:-1] - offsets[0] + torch.arange(batch, device=x.device) * past
    ends = starts + offsets.diff() + past
    extended = x.new_zeros(int(offsets[-1] - offsets[0]) + batch * past, x.shape[1])
    extended[starts[:, None] + torch.arange(past, device=x.device)] = state
    extended[at[inside]] = x[inside]
    return extended, at, ends


def gates(
    f: Tensor,
    *,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    round: Round = exact,
) -> tuple[Tensor, Tensor]:
    """Log decay g and beta = sigmoid(b); with z = f + dt_bias and A = exp(a_log) per head:
    g = lower_bound sigmoid(A z), or -A softplus(z) when there is no bound.

    f [rows, H, dk], b [rows, H], a_log [H], dt_bias [H, dk] -> g [rows, H, dk] <= 0, beta [rows, H], both at least
    float32. Raises ValueError when a_log has not one entry per head (it would broadcast over channels silently).
    """
    if a_log.shape != f.shape[1:2]:
        raise ValueError(f"kda.gates: a_log has shape {tuple(a_log.shape)}, needs ({f.shape[1]},): one entry per head")
    z, beta, log_a, bias = wide(f, b, a_log, dt_bias)
    z, a = z + bias, log_a.exp()[:, None]
    g = -a * _softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(a * z)
    return round("out", g), round("out", torch.sigmoid(beta))


def _softplus(x: Tensor) -> Tensor:
    # torch's own softplus turns linear above 20, which is an error of 2e-9: too much for a float64 oracle
    return x.clamp(min=0) + torch.log1p(torch.exp(-x.abs()))


def attention(
    q: Tensor,
    *,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    offsets: Tensor,
    chunk: int | None = None,
    round: Round = exact,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, on L2-normalised q and k with q scaled by dk^-1/2, o read after the update:

        S' = diag(exp(g)) S,   S = S' + beta k (v - k^T S')^T,   o = S^T q

    q, k, g [rows, H, dk], v [rows, H, dv], beta [rows, H], state [batch, H, dk, dv], offsets int64 [batch + 1]
    -> o [rows, H, dv] in q's dtype, new state in at least float32. chunk None goes token by token; a number uses the
    chunked form with that chunk size, equal in exact arithmetic. The state is rounded at "state" before every chunk (or
    token) but the first, and at "kept" where the call ends.
    """
    dk = q.shape[-1]
    wide_q, wide_k, wide_v, decay, rate, before = wide(q, k, v, g, beta, state)
    wide_q, wide_k = l2_norm(wide_q) * dk**-0.5, l2_norm(wide_k)
    longest_first = torch.sort(offsets.diff(), descending=True, stable=True).indices
    after = before[longest_first]
    y = torch.zeros_like(wide_v)
    step = 1 if chunk is None else chunk
    for first, (rows, valid) in enumerate(_steps(offsets, longest_first, step)):
        active = rows.shape[0]
        parts = [t[rows].transpose(1, 2) for t in (wide_q, wide_k, wide_v, decay)]  # [active, H, length, ...]
        parts.append(rate[rows].transpose(1, 2)[..., None])
        if first:
            after[:active] = round("state", after[:active])
        if chunk is None:
            o, after[:active] = _one_token(*parts, after[:active])
        else:
            masked = [t.masked_fill(~valid[:, None, :, None], 0) for t in parts]  # beta = g = 0 leave the state alone
            o, after[:active] = _one_chunk(*masked, after[:active], round)
        y[rows[valid]] = o.transpose(1, 2)[valid]
    new_state = torch.empty_like(after)
    new_state[longest_first] = after
    return round("out", y).to(q.dtype), round("kept", new_state)


def _steps(offsets: Tensor, longest_first: Tensor, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Row numbers [active, length] and their validity, `step` tokens of all requests that have any left at a time.

    Requests come longest first, so the active ones are always the first of them.
    """
    starts, lengths = offsets[:-1][longest_first], offsets.diff()[longest_first]
    counts = lengths.tolist()
    for first in range(0, counts[0] if counts else 0, step):
        active = sum(count > first for count in counts)
        local = first + torch.arange(min(step, counts[0] - first), device=offsets.device)
        valid = local < lengths[:active, None]
        yield starts[:active, None] + torch.where(valid, local, first), valid


def _one_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One update of each state [active, H, dk, dv] and the read after it; all others [active, H, 1, ...]."""
    state = g.exp().transpose(-1, -2) * state
    state = state + k.transpose(-1, -2) * (beta * (v - k @ state))
    return q @ state, state


def _one_chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, round: Round
) -> tuple[Tensor, Tensor]:
    """The updates of a whole chunk at once: q, k, g [active, H, C, dk], v [.., C, dv], beta [.., C, 1], state
    [.., dk, dv]; "operands" are the matrix operands that a bf16 kernel rounds.

    With G the running sum of g, A[i, j] = beta_i k_i . (k_j exp(G_i - G_j)) for j < i and T = (I + A)^-1:
    U = T diag(beta) V, W = T diag(beta) (K exp G), V~ = U - W S,
    O = (Q exp G) S + tril(q_i . (k_j exp(G_i - G_j))) V~,  S <- diag(exp G_C) S + (K exp(G_C - G))^T V~.
    """
    total = g.cumsum(-2)
    kk, qk = _decayed_products(q, k, total)
    unit = torch.eye(q.shape[-2], dtype=q.dtype, device=q.device)
    inverse = torch.linalg.solve_triangular(  # forward substitution: inversion by doubling loses accuracy here
        unit + beta * kk, unit.expand_as(kk), upper=False, unitriangular=True
    )
    inverse, operand = round("operands", inverse), round("operands", state)
    u = round("operands", inverse @ (beta * v))
    w = round("operands", inverse @ (beta * round("operands", k * total.exp())))
    fresh = round("operands", u - w @ operand)
    y = round("operands", q * total.exp()) @ operand + round("operands", qk) @ fresh
    last = total[..., -1:, :]
    late = round("operands", k * (last - total).exp())
    return y, last.exp().transpose(-1, -2) * state + late.transpose(-1, -2) @ fresh


def _decayed_products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """sum_d k_i k_j exp(G_i - G_j) for j < i, and sum_d q_i k_j exp(G_i - G_j) for j <= i: [.., C, C], else 0.

    The exponent is formed as a difference: exp(G_i) and exp(-G_j) alone overflow float32 after 18 tokens at g = -5.
    """
    shape, (c, dk) = k.shape[:-2], k.shape[-2:]
    q, k, total = (t.reshape(-1, c, dk) for t in (q, k, total))
    causal = torch.ones(c, c, dtype=torch.bool, device=k.device).tril()
    kk, qk = k.new_empty(len(k), c, c), k.new_empty(len(k), c, c)
    size = max(1, BLOCK_ELEMENTS // (c * c * dk))
    for start in range(0, len(k), size):
        own = slice(start, start + size)
        decay = total[own, :, None] - total[own, None, :]
        decayed = decay.masked_fill_(~causal[..., None], -torch.inf).exp_().mul_(k[own, None, :])  # k_j exp(G_i - G_j)
        kk[own] = (decayed @ k[own, :, :, None]).squeeze(-1).tril(-1)
        qk[own] = (decayed @ q[own, :, :, None]).squeeze(-1)
    return kk.reshape(*shape, c, c), qk.reshape(*shape, c, c)


def output(x: Tensor, *, gate: Tensor, norm_weight: Tensor, weight: Tensor, eps: float, round: Round = exact) -> Tensor:
    """(w RMSNorm_dv(o) * sigmoid(gate)) Wo^T: x [rows, H, dv], gate [rows, H*dv], norm_weight [dv],
    weight [D, H*dv] -> [rows, D] in x's dtype. Norm and gate in at least float32, one rounding ("gated")."""
    o, z, nw, w = wide(x, gate, norm_weight, weight)
    normed = nw * o / o.square().mean(-1, keepdim=True).add(eps).sqrt()
    gated = round("gated", normed.flatten(1) * torch.sigmoid(z))
    return round("out", gated @ w.T).to(x.dtype)
