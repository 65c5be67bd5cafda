"""Sparse index of the fast path: block-wise scores, top-k inside blocks, and a merge over blocks."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from day0check.accelerated.ops.arithmetic import by_owner, cached_rows, linear, product, split_rows, wide

SCORE_BLOCK = 1024  # keys whose products with the heads of a block of rows are held at once
DOT_ELEMENTS = 1 << 18  # of these products: 1 MiB, what a CPU's second cache holds while they are passed over
FEW_DOTS = 1 << 18  # up to which a step of few rows makes them in one product
SELECT_BLOCK = 256
FEW_SCORES = 1 << 14  # of one row, whose largest are sooner found among all than by groups
GROUP = 8  # neighbouring scores whose maximum may be known beforehand
NONE = torch.iinfo(torch.int64).min


def index_weights(x: Tensor, *, weight: Tensor) -> Tensor:
    """(x W) HI^-1/2 in float32: `x` [rows, D], `weight` [HI, D], result [rows, HI]."""
    return product(x, weight) * weight.shape[0] ** -0.5


def index_key(x: Tensor, *, weight: Tensor, norm_weight: Tensor, norm_bias: Tensor, eps: float) -> Tensor:
    """LayerNorm(x W): `x` [rows, D], `weight` [dI, D]; the projection is rounded, the norm is float32 inside."""
    k = wide(linear(x, weight=weight))
    return F.layer_norm(k, k.shape[-1:], norm_weight.to(k.dtype), norm_bias.to(k.dtype), eps).to(x.dtype)


def pool_key(keys: Tensor, *, gates: Tensor, ape: Tensor) -> Tensor:
    """Per channel, softmax over the P tokens of a pool of (gate + ape) weighting its keys; `keys` [pools, P, dI]."""
    share = torch.softmax(wide(gates) + ape.to(wide(gates).dtype), 1)
    return (share * wide(keys)).sum(1).to(keys.dtype)


def score(q: Tensor, *, weights: Tensor, keys: Tensor, owner: Tensor, scale: float) -> Tensor:
    """sum_h w_h scale ReLU(q_h . k) for every key of the row's request.

    `q` [rows, HI, dI], `weights` [rows, HI], `keys` [batch, n, dI], `owner` [rows] (-1: zeros). Result [rows, n],
    float32.
    """
    rows, heads, _ = q.shape
    a = wide(q)
    w = (weights * scale).to(a.dtype).unsqueeze(1)
    out = a.new_empty(rows, keys.shape[1]) if rows else a.new_zeros(0, keys.shape[1])
    groups = by_owner(owner, keys.shape[0])
    if sum(_count(mine) for _, mine in groups) < rows:
        out.zero_()  # padding rows
    block = max(SCORE_BLOCK, FEW_DOTS // (heads * max(1, rows)))  # few rows meet many keys at a time
    size = max(1, DOT_ELEMENTS // (heads * block))
    if len(groups) == 1 and _count(groups[0][1]) == rows <= size and 0 < keys.shape[1] <= block:
        dots = (a.flatten(0, 1) @ wide(keys[groups[0][0]]).T).relu_()  # at once, and not copied
        return torch.bmm(w, dots.view(rows, heads, -1)).squeeze(1)
    for request, rows_of_it in groups:
        k = wide(keys[request])
        for mine in split_rows(rows_of_it, size):
            flat, own = a[mine].flatten(0, 1), w[mine]
            for start in range(0, k.shape[0], block):
                dots = (flat @ k[start : start + block].T).relu_().view(own.shape[0], heads, -1)
                out[mine, start : start + block] = torch.bmm(own, dots).squeeze(1)
    return out


def _count(rows: slice | Tensor) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else rows.numel()


def ordered(scores: Tensor, columns: Tensor) -> Tensor:
    """Unique int64 keys that sort as (score, lower column first): any top-k of them is exact and free of ties.

    The bits of a float32 are an integer that orders like the number once negative ones are mirrored; the column fills
    the lower half. -0.0 counts as 0.0 and NaN below every number.
    """
    bits = (scores.float() + 0.0).view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = order.masked_fill(torch.isnan(scores), torch.iinfo(torch.int32).min)
    return (order.to(torch.int64) << 32) + (0x7FFFFFFF - columns)


def select(scores: Tensor, *, k: int, visible: Tensor, threshold: float | None = None) -> Tensor:
    """Indices of the `k` best of the first `visible` [rows] of `scores` [rows, n]; int32 [rows, k], -1 = none.

    Among equal scores the lower index wins. With `threshold` only scores that reach it are chosen. Rows are worked on
    in blocks. Where a CPU sees that neither ties nor NaN decide, plain top-k does; else top-k inside blocks of columns
    by their exact order, then top-k of the blocks' winners: a winner over all is a winner of its block.
    """
    return select_knowing(scores, None, k=k, visible=visible, threshold=threshold)


def select_knowing(
    scores: Tensor, maxima: Tensor | None, *, k: int, visible: Tensor, threshold: float | None = None
) -> Tensor:
    """As `select`, where `maxima` [rows, n / GROUP] of every GROUP neighbouring scores, hidden ones too, are known."""
    rows, n = scores.shape
    if rows == 1 and threshold is None and scores.device.type == "cpu":
        found = _select_of_one(scores[0, : min(n, max(0, int(visible)))], k)
        if found is not None:
            return found
    out = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    if not n or not k:
        return out
    columns = torch.arange(n, device=scores.device)
    for block in cached_rows(scores, n):
        seen = visible[block].unsqueeze(1)
        if scores.device.type != "cpu":
            out[block] = _ranked(scores[block], columns, seen, k, threshold)
            continue
        width = min(n, max(0, int(seen.max())))
        own = scores[block, :width]
        known = None if maxima is None else maxima[block, : -(-width // GROUP)]
        found, clear = _plainly(own, columns[:width], seen, k, threshold, known)
        if not clear.all():
            found[~clear] = _ranked(own[~clear], columns[:width], seen[~clear], k, threshold)
        out[block] = found
    return out


def _select_of_one(seen: Tensor, k: int) -> Tensor | None:
    """Indices int32 [1, k] of the k best of the scores `seen` [n] of one row; None where there are no more than k, or
    a tie or a NaN may decide."""
    if not 0 < k < seen.shape[0]:
        return None
    if seen.shape[0] <= FEW_SCORES:
        values, places = seen.topk(k + 1)
    else:
        values, places = (found.squeeze(0) for found in _largest(seen.unsqueeze(0), k + 1))
        values, by_value = values.sort(descending=True)
        places = places.index_select(0, by_value)
    worst, left_out = values[k - 1 :].tolist()
    if not worst > left_out or math.isnan(float(seen.sum())):
        return None
    return places[:k].to(torch.int32).unsqueeze(0)


def _plainly(
    scores: Tensor, columns: Tensor, visible: Tensor, k: int, threshold: float | None, maxima: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Indices int32 [rows, k] by the scores themselves, and for which rows [rows] they are sure.

    A row is sure when the best score that is left out is smaller than the worst that is chosen: then no tie and no NaN
    decides. A row that sees no more than k keys is sure as well: it takes all of them.
    """
    n = scores.shape[1]
    few = visible.squeeze(1) <= k
    every = torch.arange(k)
    if n > k:
        seen = scores.masked_fill(columns >= visible, float("-inf"))
        if maxima is None or maxima.shape[1] <= k:
            values, places = _largest(seen, k + 1)
        else:
            values, places = _largest_by_maxima(seen, maxima, visible, k + 1)
        least = values.argmin(1, keepdim=True)  # the best that is left out: any of the smallest, if there are several
        worst = values.scatter(1, least, float("inf")).amin(1)
        # where a NaN comes out, and what else comes out beside it, differs between builds of torch
        clear = (worst > values.gather(1, least).squeeze(1)) & ~seen.sum(1).isnan() | few
        found = torch.where(every < least, places[:, :k], places[:, 1:])  # all but that one
        found = torch.where(few.unsqueeze(1), torch.where(every < visible, every, -1), found)
    else:
        clear, found = few, torch.where(every < visible, every, -1)
    if threshold is not None:
        reached = scores.gather(1, found.clamp(0, max(0, n - 1))) >= threshold if n else found < 0
        found = torch.where((found >= 0) & reached, found, -1)
    return found.to(torch.int32), clear


def _largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest values of each row of `scores` [rows, n] and where they are, both [rows, k], in any order.

    Of a long row the largest of every few columns go first: the k largest lie among the columns that stand for the k
    largest of those.
    """
    n = scores.shape[1]
    if n < 12 * k:
        return scores.topk(k, dim=-1, sorted=False)
    width = 4 if n < 48 * k else 8
    groups = -(-n // width)
    if groups * width > n:
        scores = F.pad(scores, (0, groups * width - n), value=float("-inf"))
    grouped = scores.view(-1, width, groups)
    best = grouped.amax(1).topk(k, dim=-1, sorted=False).indices
    among = grouped.gather(2, best.unsqueeze(1).expand(-1, width, -1)).flatten(1)
    values, places = among.topk(k, dim=-1, sorted=False)
    return values, best.gather(1, places % k) + places.div(k, rounding_mode="floor") * groups


def _largest_by_maxima(scores: Tensor, maxima: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """As `_largest`, with the maxima of neighbours known but for those that are hidden: `scores` [rows, n] are -inf
    behind the first `visible` [rows, 1], `maxima` [rows, ceil(n / GROUP)] are not."""
    rows, groups = maxima.shape
    scores = F.pad(scores, (0, groups * GROUP - scores.shape[1]), value=float("-inf"))
    grouped = scores.view(rows, groups, GROUP)
    edge = visible.div(GROUP, rounding_mode="floor").clamp_(max=groups - 1)  # the group that ends among hidden ones
    first = torch.arange(0, groups * GROUP, GROUP)
    bound = maxima.masked_fill(first + GROUP > visible, float("-inf"))
    bound.scatter_(1, edge, grouped.gather(1, edge.unsqueeze(-1).expand(-1, -1, GROUP)).amax(-1))
    best = bound.topk(k, dim=-1, sorted=False).indices
    among = grouped.gather(1, best.unsqueeze(-1).expand(-1, -1, GROUP)).flatten(1)
    values, places = among.topk(k, dim=-1, sorted=False)
    return values, best.gather(1, places.div(GROUP, rounding_mode="floor")) * GROUP + places % GROUP


def _ranked(scores: Tensor, columns: Tensor, visible: Tensor, k: int, threshold: float | None) -> Tensor:
    """Indices int32 [rows, k] by the exact order of scores and columns, -1 for none."""
    if not scores.shape[1]:
        return torch.full((scores.shape[0], k), -1, dtype=torch.int32, device=scores.device)
    best = _best_of(scores, columns, visible, k, threshold)
    found = torch.where(best == NONE, -1, 0x7FFFFFFF - (best & 0xFFFFFFFF)).to(torch.int32)
    return F.pad(found, (0, k - found.shape[1]), value=-1)


def _best_of(scores: Tensor, columns: Tensor, visible: Tensor, k: int, threshold: float | None) -> Tensor:
    """The largest min(k, n) sort keys of each row, NONE where it has fewer: `scores` [rows, n], `visible` [rows, 1]."""
    keys = ordered(scores, columns)
    hidden = columns >= visible
    if threshold is not None:
        hidden = hidden | ~(scores >= threshold)
    keys.masked_fill_(hidden, NONE)
    rows, n = keys.shape
    size = max(SELECT_BLOCK, 4 * k)
    blocks = -(-n // size)
    if blocks > 1:
        keys = F.pad(keys, (0, blocks * size - n), value=NONE).view(rows, blocks, size)
        keys = keys.topk(k, dim=-1, sorted=False).values.flatten(1)
    return keys.topk(min(k, keys.shape[1]), dim=-1, sorted=False).values


def expand(indices: Tensor, *, visible: Tensor, pool: int, tail: bool) -> Tensor:
    """Tokens of the chosen pools `indices` int32 [rows, k], -1 for none, and with `tail` those of the `visible` [rows]
    tokens that lie behind the last whole pool: int32 [rows, k * pool (+ pool - 1)], -1 for none."""
    rows = indices.shape[0]
    inside = torch.arange(pool, dtype=indices.dtype, device=indices.device)
    tokens = torch.where(indices.unsqueeze(-1) < 0, -1, indices.unsqueeze(-1) * pool + inside).reshape(rows, -1)
    if not tail:
        return tokens
    rest = visible.remainder(pool).unsqueeze(1)
    behind = visible.unsqueeze(1) - rest + inside[: pool - 1]
    return torch.cat((tokens, torch.where(inside[: pool - 1] < rest, behind, -1).to(indices.dtype)), 1)
