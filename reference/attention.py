"""Multi-head latent attention and DeepSeek sparse attention (model.md 2.3, 2.4).

Rows first: owner[row] is the row's request in the batch axis, -1 a padding row, which gets zeros. H heads, Hk = H or 1
key heads, n keys, d and dv query and value dims, HI index heads of dim dI.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from reference.norm import layer_norm
from reference.ordering import NEVER, best, rank
from reference.rounding import Round, exact, wide

BLOCK_ELEMENTS = 2**24  # largest intermediate of one block of rows


def attention(
    q: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    owner: Tensor,
    visible: Tensor,
    scale: float,
    round: Round = exact,
) -> Tensor:
    """softmax(scale q k^T) v of each row over the first `visible[row]` keys of its own request.

    q [rows, H, d], keys [batch, n, Hk, d], values [batch, n, Hk, dv], owner and visible int64 [rows]
    -> [rows, H, dv] in q's dtype; zeros for a row that sees no key. Keys that a row does not see never reach it, NaN
    included. The points: s = scaled scores, p = the normalised softmax, out.
    """
    y, _ = _attended(q, keys, values, owner, visible, scale, round)
    return round("out", y).to(q.dtype)


def partial_attention(
    q: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    owner: Tensor,
    visible: Tensor,
    scale: float,
    round: Round = exact,
) -> tuple[Tensor, Tensor]:
    """`attention` over a part of the keys, and what `merge_partial` needs to join it with other parts.

    Arguments as there, or keys and values of Hk heads that neighbouring query heads share -> (y [rows, H, dv] in q's
    dtype, lse [rows, H] at least float32): lse is the natural logarithm of the sum of exp(scale q k) over the keys
    seen, -inf for a row that sees none. Raises ValueError when the key heads do not divide the query heads.
    """
    heads, groups = q.shape[1], keys.shape[2]
    if heads % groups:
        raise ValueError(f"mla.partial: {heads} query heads are no multiple of {groups} key heads")
    if 1 < groups < heads:
        keys, values = (t.repeat_interleave(heads // groups, 2) for t in (keys, values))
    y, lse = _attended(q, keys, values, owner, visible, scale, round)
    return round("out", y).to(q.dtype), lse


def _attended(
    q: Tensor, keys: Tensor, values: Tensor, owner: Tensor, visible: Tensor, scale: float, round: Round
) -> tuple[Tensor, Tensor]:
    """(softmax(scale q k^T) v before its last rounding, logarithm [rows, H] of the softmax's denominator)."""
    wide_q, wide_k, wide_v = wide(q, keys, values)
    heads, seen = q.shape[1], visible.clamp(0, keys.shape[1])
    y = wide_q.new_zeros(q.shape[0], heads, values.shape[-1])
    lse = wide_q.new_full((q.shape[0], heads), -torch.inf)
    per_key = max(heads, keys.shape[2] * (keys.shape[3] + values.shape[3]))
    for rows, request in _row_blocks(owner, elements=keys.shape[1] * per_key):
        n = int(seen[rows].max())
        mask = torch.arange(n, device=q.device) < seen[rows, None]
        at = owner[rows] if request is None else request
        k, v = wide_k[at, :n], wide_v[at, :n]
        if request is None:  # keys of its own for every row
            k, v = (t.masked_fill(~mask[:, :, None, None], 0) for t in (k, v))
            s = round("s", scale * torch.einsum("rhd,rnhd->rhn", wide_q[rows], k))
            y[rows] = torch.einsum("rhn,rnhv->rhv", _probabilities(s, mask, round), v)
        else:
            s = round("s", scale * torch.einsum("rhd,nhd->rhn", wide_q[rows], k))
            y[rows] = _weighted(_probabilities(s, mask, round), v, mask)
        if n:
            lse[rows] = torch.logsumexp(s.masked_fill(~mask[:, None, :], -torch.inf), dim=-1)
    return y, lse


def _row_blocks(owner: Tensor, *, elements: int) -> Iterator[tuple[Tensor, int | None]]:
    """(row numbers, request) in blocks of rows of one request, at most BLOCK_ELEMENTS at `elements` per row; request
    is None for a block of rows of different requests, given when no request has more than one row. No padding rows."""
    size = max(1, BLOCK_ELEMENTS // max(1, elements))
    rows = torch.nonzero(owner >= 0).flatten()
    requests, counts = torch.unique(owner[rows], return_counts=True)
    if len(requests) == len(rows):
        for block in rows.split(size) if len(rows) else ():
            yield block, int(owner[block[0]]) if len(rows) == 1 else None
        return
    by_request = rows[torch.sort(owner[rows], stable=True).indices]
    for request, own in zip(requests.tolist(), by_request.split(counts.tolist()), strict=True):
        for block in own.split(size):
            yield block, request


def _probabilities(s: Tensor, mask: Tensor, round: Round) -> Tensor:
    """Softmax of s [rows, H, n] over the keys in mask [rows, n]; zeros where there is none."""
    p = torch.softmax(s.masked_fill(~mask[:, None, :], -torch.inf), dim=-1)
    return round("p", p.masked_fill(~mask.any(-1)[:, None, None], 0))


def _weighted(p: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """sum_n p[r, h, n] values[n, h] where a value that is not finite reaches only the rows that see its key."""
    finite = torch.isfinite(values).flatten(1).all(-1)
    if bool(finite.all()):
        return torch.einsum("rhn,nhv->rhv", p, values)
    y = torch.einsum("rhn,nhv->rhv", p, values.masked_fill(~finite[:, None, None], 0))
    for key in torch.nonzero(~finite).flatten().tolist():
        y += (p[:, :, key, None] * values[key]).masked_fill(~mask[:, key, None, None], 0)
    return y


def sparse_attention(
    q: Tensor, *, keys: Tensor, valid: Tensor, value_width: int, scale: float, round: Round = exact
) -> Tensor:
    """softmax(scale q k^T) v of each row over its own gathered keys; a value is the first columns of its key.

    q [rows, H, d], keys [rows, k, d] (one key head for all H), valid bool [rows, k] -> [rows, H, value_width] in q's
    dtype; zeros for a row without a valid key. Keys that are not valid may hold anything.
    """
    y = wide(q, keys)[0].new_zeros(q.shape[0], q.shape[1], value_width)
    size = max(1, BLOCK_ELEMENTS // max(1, keys.shape[1] * max(q.shape[1], keys.shape[2])))
    for start in range(0, q.shape[0], size):
        rows = slice(start, start + size)
        own, k = wide(q[rows], keys[rows])
        k = k.masked_fill(~valid[rows, :, None], 0)
        s = round("s", scale * torch.einsum("rhd,rkd->rhk", own, k))
        p = _probabilities(s, valid[rows], round)
        y[rows] = torch.einsum("rhk,rkv->rhv", p, k[..., :value_width])
    return round("out", y).to(q.dtype)


def merge_partial(parts: Tensor, *, lse: Tensor, round: Round = exact) -> Tensor:
    """Partial results over disjoint key sets joined by their log-sum-exp: sum_p softmax_p(lse) part_p.

    parts [rows, P, H, dv], lse [rows, P, H] (natural logarithm; -inf = an empty part, whose content is ignored)
    -> [rows, H, dv] in the parts' dtype; zeros when all parts are empty.
    """
    p, level = wide(parts, lse)
    empty = level == -torch.inf
    weight = torch.softmax(level, dim=1).masked_fill(empty, 0)
    y = (weight[..., None] * p.masked_fill(empty[..., None], 0)).sum(1)
    return round("out", y).to(parts.dtype)


def gated_output(x: Tensor, *, gate: Tensor | None = None, weight: Tensor, round: Round = exact) -> Tensor:
    """(o * sigmoid(gate)) Wo^T, or o Wo^T: x and gate [rows, H*dv], weight [D, H*dv] -> [rows, D] in x's dtype."""
    a, z, w = wide(x, gate, weight)
    gated = a if z is None else round("gated", a * torch.sigmoid(z))
    return round("out", gated @ w.T).to(x.dtype)


# ------------------------------------------------------------------------------------------------ lightning indexer


def index_weights(x: Tensor, *, weight: Tensor, round: Round = exact) -> Tensor:
    """Weight of each index head, (x W^T) HI^-1/2: x [rows, D], weight [HI, D] -> [rows, HI], at least float32."""
    a, w = wide(x, weight)
    return round("out", a @ w.T * weight.shape[0] ** -0.5)


def index_key(
    x: Tensor, *, weight: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float, round: Round = exact
) -> Tensor:
    """Index key LayerNorm(x W^T): x [rows, D], weight [dI, D], norm_weight and norm_bias [dI] -> [rows, dI]."""
    a, w = wide(x, weight)
    projected = round("projected", a @ w.T)
    return layer_norm(projected, weight=norm_weight, bias=norm_bias, eps=eps, round=round).to(x.dtype)


def pool_key(keys: Tensor, *, gates: Tensor, ape: Tensor, round: Round = exact) -> Tensor:
    """Key of each pool of P tokens: per channel, softmax over the tokens of (gate + ape) weights the index keys.

    keys and gates [pools, P, dI], ape [P, dI] -> [pools, dI] in the keys' dtype (GLM-5.3 k-pool). Gates of -inf leave a
    token out: with overlapping pools (DeepSeek-V4) those of the pool that the first one would overlap.
    """
    k, g, a = wide(keys, gates, ape)
    return round("out", (torch.softmax(g + a, dim=1) * k).sum(1)).to(keys.dtype)


def index_scores(
    q: Tensor, *, weights: Tensor, keys: Tensor, owner: Tensor, scale: float, round: Round = exact
) -> Tensor:
    """I(t, s) = sum_h w_h scale ReLU(q_h . k_s) for every key of the row's request, visible or not.

    q [rows, HI, dI], weights [rows, HI], keys [batch, n, dI], owner int64 [rows] -> [rows, n], at least float32.
    ReLU comes before the weight, which may be negative. `scale` is dI^-1/2 of the index head (HI^-1/2 is in the
    weights). Padding rows get zeros.
    """
    wide_q, wide_w, wide_k = wide(q, weights, keys)
    scores = wide_q.new_zeros(q.shape[0], keys.shape[1])
    for rows, request in _row_blocks(owner, elements=keys.shape[1] * max(q.shape[1], keys.shape[2])):
        if request is None:
            dots = torch.einsum("rhd,rnd->rhn", wide_q[rows], wide_k[owner[rows]])
        else:
            dots = torch.einsum("rhd,nd->rhn", wide_q[rows], wide_k[request])
        scores[rows] = scale * torch.einsum("rhn,rh->rn", dots.relu_(), wide_w[rows])
    return round("out", scores)


def select(scores: Tensor, *, k: int, visible: Tensor, threshold: float | None = None) -> Tensor:
    """The k best of the first `visible[row]` scores of each row, as positions in ascending order, then -1.

    scores [rows, n], visible int64 [rows] -> int32 [rows, k]. With `threshold` only scores >= threshold compete.
    Among equal scores the lower index wins; -inf is a number like any other, NaN ranks behind every number (so a row
    that sees at most k keys takes them all) and never reaches a threshold.
    """
    rows, n = scores.shape
    indices = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    column = torch.arange(n, device=scores.device)
    size = max(1, BLOCK_ELEMENTS // (4 * max(1, n)))  # ranks are int64 and several masks live at once
    for start in range(0, rows, size):
        own = scores[start : start + size]
        eligible = column < visible[start : start + size, None]
        if threshold is not None:
            eligible &= own >= threshold
        chosen = best(rank(own).masked_fill(~eligible, NEVER), k)
        row, key = torch.nonzero(chosen, as_tuple=True)
        place = (chosen.cumsum(-1) - 1)[row, key]
        indices[start + row, place] = key.to(torch.int32)
    return indices


def expand_pools(indices: Tensor, *, visible: Tensor, pool: int, tail: bool) -> Tensor:
    """Selected pools as the positions of their tokens, then the tail: the visible tokens behind the last whole pool.

    indices int32 [rows, k] (-1: none), visible int64 [rows] -> int32 [rows, k * pool + (pool - 1 if tail)], -1 = none.
    Pool p holds positions p * pool to p * pool + pool - 1. A row whose last visible token ends a pool has no tail, so
    it attends to itself only if that pool was selected (GLM-5.3 k-pool).
    """
    offset = torch.arange(pool, dtype=torch.int32, device=indices.device)
    tokens = (indices[..., None] * pool + offset).masked_fill(indices[..., None] < 0, -1).flatten(1)
    if not tail or pool == 1:
        return tokens
    first = (visible // pool * pool).to(torch.int32)[:, None]
    rest = first + offset[:-1]
    return torch.cat([tokens, rest.masked_fill(rest >= visible[:, None], -1)], dim=1)
