"""Kimi delta attention of the fast path: chunked over a prompt, recurrent over single tokens.

Inside a chunk, decays are only ever formed as exp of a non-positive difference of cumulated logs: pairs inside a
sub-chunk of 4 tokens directly, pairs of two neighbouring blocks (of 4, then of 8, 16, ...) as a product of two decays
that meet where the blocks do. Neither can overflow, and logs are cumulated in float64 so that a far-decayed chunk keeps
its small differences.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from day0check.accelerated.ops.arithmetic import BLOCK_ELEMENTS, linear, row_blocks, wide

SUB_CHUNK = 4
PAIR_ELEMENTS = 1 << 19  # of the decays of pairs that exist at once on a CPU
FEW_STATE_ELEMENTS = 1 << 14  # that a CPU multiplies and adds up sooner than it sets up a product of matrices
L2_EPS = 1e-6


def conv(x: Tensor, *, weight: Tensor, state: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution over [state | rows] of each request, then SiLU.

    `x` [rows, C], `weight` [C, W] (last tap = the current row), `state` [batch, W-1, C], `offsets` [batch+1]. Returns y
    [rows, C] in the type of `x` and the new state, the last W-1 raw rows.
    """
    width = weight.shape[1]
    bounds = offsets.tolist()
    if bounds[-1] < x.shape[0]:  # padding rows
        y, new_state = conv(x[: bounds[-1]], weight=weight, state=state, offsets=offsets)
        return F.pad(y, (0, 0, 0, x.shape[0] - bounds[-1])), new_state
    taps = weight.to(wide(x).dtype)
    if x.shape[0] == state.shape[0] and bounds == list(range(x.shape[0] + 1)):
        window = torch.cat((state, x.unsqueeze(1).to(state.dtype)), 1)  # [batch, W, C]
        y = (wide(window) * taps.T).sum(1)
        return F.silu(y).to(x.dtype), window[:, 1:].contiguous()
    y = x.new_empty(x.shape)
    new_state = torch.empty_like(state)
    for b, (start, stop) in enumerate(itertools.pairwise(bounds)):
        past = torch.cat((state[b], x[start:stop].to(state.dtype)))
        new_state[b] = past[past.shape[0] - (width - 1) :]
        if stop > start:
            summed = F.conv1d(wide(past).T.unsqueeze(0), taps.unsqueeze(1), groups=taps.shape[0])
            y[start:stop] = F.silu(summed.squeeze(0).T).to(x.dtype)
    return y, new_state


def gates(f: Tensor, *, b: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> tuple[Tensor, Tensor]:
    """Log decay and write strength, float32: `f` [rows, H, dk], `b` [rows, H], `a_log` [H], `dt_bias` [H, dk]."""
    rate = torch.exp(wide(a_log)).unsqueeze(-1)
    biased = wide(f) + dt_bias
    decay = lower_bound * torch.sigmoid(rate * biased) if lower_bound is not None else -rate * F.softplus(biased)
    return decay, torch.sigmoid(wide(b))


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
) -> tuple[Tensor, Tensor]:
    """Gated delta rule over each request's rows, from `state` [batch, H, dk, dv] on.

    `q`, `k`, `g` [rows, H, dk], `v` [rows, H, dv], `beta` [rows, H], `offsets` [batch+1]. `chunk` None: recurrent, else
    that many tokens at once. Returns y [rows, H, dv] in the type of `q` and the new state.
    """
    rows = int(offsets[-1])
    if rows < q.shape[0]:  # padding rows
        own = {name: t[:rows] for name, t in {"k": k, "v": v, "g": g, "beta": beta}.items()}
        y, new_state = attention(q[:rows], **own, state=state, offsets=offsets, chunk=chunk)
        return F.pad(y, (0, 0, 0, 0, 0, q.shape[0] - rows)), new_state
    normed_q = _unit(q) * q.shape[-1] ** -0.5
    operands = (normed_q, _unit(k), wide(v), g, beta)
    bounds = offsets.tolist()
    if chunk is None:
        y, new_state = _recurrent(operands, state, bounds)
        return y.to(q.dtype), new_state
    y, new_state = torch.empty_like(operands[2]), torch.empty_like(state)
    for b, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start == stop:
            new_state[b] = state[b]
            continue
        y[start:stop], new_state[b] = _chunked(tuple(t[start:stop] for t in operands), state[b], chunk)
    return y.to(q.dtype), new_state


def _unit(x: Tensor) -> Tensor:
    a = wide(x)
    if a.device.type == "cpu" and a.dtype == torch.float32:  # in one pass
        return a * torch.linalg.vector_norm(a, dim=-1, keepdim=True).square_().add_(L2_EPS).rsqrt_()
    return a * torch.rsqrt(torch.sum(torch.square(a), -1, keepdim=True) + L2_EPS)


def _recurrent(operands: tuple[Tensor, ...], state: Tensor, bounds: list[int]) -> tuple[Tensor, Tensor]:
    """One token of every request at a time, all requests together."""
    lengths = [stop - start for start, stop in itertools.pairwise(bounds)]
    y = torch.empty_like(operands[2])
    if all(n == 1 for n in lengths):
        y, new_state = _token(operands, state)
        return y, new_state
    new_state = state.clone()
    for t in range(max(lengths, default=0)):
        alive = [b for b, n in enumerate(lengths) if n > t]
        rows = torch.tensor([bounds[b] + t for b in alive], device=state.device)
        at = torch.tensor(alive, device=state.device)
        y[rows], new_state[at] = _token(tuple(x[rows] for x in operands), new_state[at])
    return y, new_state


def _token(operands: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v, g, beta = operands
    decayed = state * torch.exp(g).unsqueeze(-1)
    missing = (v - _read(k, decayed)).mul_(beta.unsqueeze(-1))
    new_state = decayed.addcmul_(k.unsqueeze(-1), missing.unsqueeze(-2))
    return _read(q, new_state), new_state


def _read(x: Tensor, state: Tensor) -> Tensor:
    """x S of each head: `x` [rows, H, dk], `state` [rows, H, dk, dv], result [rows, H, dv]."""
    if state.numel() <= FEW_STATE_ELEMENTS and state.device.type == "cpu":
        return (x.unsqueeze(-1) * state).sum(-2)
    return (x.unsqueeze(-2) @ state).squeeze(-2)


def _chunked(operands: tuple[Tensor, ...], state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """All rows of one request, `chunk` at a time: operands [T, H, ...], `state` [H, dk, dv]."""
    rows = operands[0].shape[0]
    size = SUB_CHUNK
    while size < min(chunk, rows):
        size *= 2
    count = -(-rows // size)
    # padding tokens have beta = 0, g = 0: they leave the state as it is
    q, k, v, g = (
        F.pad(t, (0, 0, 0, 0, 0, count * size - rows)).view(count, size, *t.shape[1:]).transpose(1, 2)
        for t in operands[:4]
    )
    beta = F.pad(operands[4], (0, 0, 0, count * size - rows)).unflatten(0, (count, size)).transpose(1, 2)
    heads, dk, dv = q.shape[1], q.shape[3], v.shape[3]
    y = v.new_empty(count, heads, size, dv)
    per_chunk = heads * size * max(SUB_CHUNK * dk, size, dv)
    limit = PAIR_ELEMENTS if q.device.type == "cpu" else BLOCK_ELEMENTS
    for block in row_blocks(count, per_chunk, limit=limit):
        local = _inside(q[block], k[block], v[block], g[block], beta[block])
        for i, (u, w, reach, read, write, keep) in enumerate(zip(*local, strict=True), start=block.start):
            fresh = u - w @ state
            y[i] = read @ state + reach @ fresh
            state = keep.unsqueeze(-1) * state + write.transpose(-1, -2) @ fresh
    return y.transpose(1, 2).reshape(count * size, heads, dv)[:rows], state


def _inside(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """What a chunk is without its incoming state; inputs [n, H, C, d], `beta` [n, H, C].

    Returns U [n, H, C, dv] and W [n, H, C, dk] (by forward substitution), the reach of each written row into each query
    [n, H, C, C], decayed queries and keys [n, H, C, dk], and the decay of the whole chunk [n, H, dk].
    """
    total = g.double().cumsum(2)
    grown = torch.exp(total).to(q.dtype)
    write = torch.exp(total[:, :, -1:] - total).to(q.dtype) * k
    # two pair products share every decay: rows of k for the system, rows of q for the reach
    pairs = _decayed_pairs(torch.stack((k, q)), k, total)
    system = pairs[0].tril(-1) * beta.unsqueeze(-1)
    right = torch.cat((v, k * grown), -1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
    return u, w, pairs[1].tril(), q * grown, write, grown[:, :, -1]


def _decayed_pairs(left: Tensor, right: Tensor, total: Tensor) -> Tensor:
    """sum_d left_i,d right_j,d exp(total_i,d - total_j,d) for j <= i (the rest is undefined but finite).

    `left` [m, n, H, C, d], `right` and `total` [n, H, C, d], result [m, n, H, C, C]; C is
    SUB_CHUNK times a power of two.
    """
    size = right.shape[2]
    out = right.new_zeros(*left.shape[:-1], size)
    blocks = (size // SUB_CHUNK, SUB_CHUNK)
    mine = total.unflatten(2, blocks)
    difference = (mine.unsqueeze(4) - mine.unsqueeze(3)).to(right.dtype).clamp_(max=0.0)  # above the diagonal it grows
    weighted = difference.exp_().mul_(right.unflatten(2, blocks).unsqueeze(3))  # [n, H, blocks, i, j, d]
    direct = weighted @ left.unflatten(3, blocks).movedim(0, -1)  # [n, H, blocks, i, j, m]
    _diagonal(out, SUB_CHUNK).copy_(direct.permute(5, 0, 1, 3, 4, 2))
    half = SUB_CHUNK
    while half < size:
        pairs = (size // (2 * half), 2, half)
        earlier, later = total.unflatten(2, pairs).unbind(3)
        meet = earlier[:, :, :, -1:]
        queries = left.unflatten(3, pairs)[:, :, :, :, 1] * torch.exp(later - meet).to(right.dtype)
        keys = right.unflatten(2, pairs)[:, :, :, 0] * torch.exp(meet - earlier).to(right.dtype)
        across = queries @ keys.transpose(-1, -2)
        _diagonal(out, 2 * half)[..., half:, :half, :].copy_(across.movedim(3, -1))
        half *= 2
    return out


def _diagonal(matrix: Tensor, size: int) -> Tensor:
    """The square blocks on the diagonal of `matrix` [m, n, H, C, C]: a view [m, n, H, size, size, C / size]."""
    return matrix.unflatten(4, (-1, size)).unflatten(3, (-1, size)).diagonal(dim1=3, dim2=5)


def output(x: Tensor, *, gate: Tensor, norm_weight: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(RMSNorm(x) sigmoid(gate)) W^T: `x` [rows, H, dv], `gate` [rows, H*dv], `weight` [D, H*dv]; norm and gate in
    float32, their product rounded once before W."""
    a = wide(x)
    scale = torch.rsqrt(torch.mean(torch.square(a), -1, keepdim=True) + eps)
    y = a * scale * norm_weight.to(a.dtype) * torch.sigmoid(wide(gate)).view(a.shape)
    return linear(y.flatten(1).to(x.dtype), weight=weight)
