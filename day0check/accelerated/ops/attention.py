"""Attention of the fast path: online softmax over blocks of keys, P rounded to the activation type ("flash")."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from day0check.accelerated.ops.arithmetic import BLOCK_ELEMENTS, by_owner, linear, row_blocks, split_rows, wide

KEY_BLOCK, CPU_KEY_BLOCK = 512, 256
CPU_SCORES = 1 << 17  # scores of a block of rows and keys on a CPU: 512 KiB


def attention(q: Tensor, *, keys: Tensor, values: Tensor, owner: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Each row of `q` [rows, H, d] on the first `visible` [rows] keys of its own request.

    `keys` [batch, n, Hk, d] and `values` [batch, n, Hk, dv], Hk = H or 1; `owner` [rows], -1 = padding. Result
    [rows, H, dv] in the type of `q`; a row that sees no key gives zeros.
    """
    rows, heads, _ = q.shape
    if rows == 1 and q.device.type == "cpu" and keys.shape[0] == keys.shape[2] == 1:
        n = min(keys.shape[1], int(visible)) if int(owner) == 0 else 0
        if 0 < heads * n <= CPU_SCORES:
            return _of_one(q, keys[0, :n, 0], values[0, :n, 0], scale)
    out = q.new_zeros(rows, heads, values.shape[-1])
    for mine, k, v, block in _pieces(q, keys, values, owner):
        out[mine], _, _ = _flash(q[mine], k, v, visible[mine], scale, block)
    return out


def _of_one(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """One row `q` [1, H, d] on all keys `k` [n, d] and values `v` [n, dv], which all its heads share: [1, H, dv]."""
    s = (wide(q[0]) @ wide(k).T).mul_(scale)
    top = s.amax(-1, keepdim=True)
    p = s.sub_(torch.where(top == float("-inf"), 0.0, top)).exp_()
    total = p.sum(-1, keepdim=True)
    y = wide(p.to(q.dtype)) @ wide(v)
    return y.div_(torch.where(total == 0, 1.0, total)).unsqueeze(0).to(q.dtype)


def partial_attention(
    q: Tensor, *, keys: Tensor, values: Tensor, owner: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """`attention` over a part of the keys, and the natural logarithm of what it was divided by, float32 [rows, H]:
    -inf for a row that sees none. Neighbouring query heads may share a key head."""
    rows, heads, _ = q.shape
    if 1 < keys.shape[2] < heads:
        keys, values = (t.repeat_interleave(heads // keys.shape[2], 2) for t in (keys, values))
    out = q.new_zeros(rows, heads, values.shape[-1])
    lse = wide(q).new_full((rows, heads), float("-inf"))
    for mine, k, v, block in _pieces(q, keys, values, owner):
        out[mine], top, total = _flash(q[mine], k, v, visible[mine], scale, block)
        logarithm = top + torch.log(total)
        lse[mine] = logarithm.reshape(-1, heads) if k.shape[0] == 1 else logarithm.T
    return out, lse


def _pieces(q: Tensor, keys: Tensor, values: Tensor, owner: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """(rows of one request, its keys [Hk, d, n] and values [Hk, n, dv], keys of a block) for `_flash`, in blocks of
    rows whose scores fit the caches of a CPU."""
    rows, heads, _ = q.shape
    # on a CPU few rows at a time: their scores stay in its caches, and keys that come after all of them are left out
    limit, least = (CPU_SCORES, CPU_KEY_BLOCK) if q.device.type == "cpu" else (BLOCK_ELEMENTS, KEY_BLOCK)
    block = max(least, limit // (heads * max(1, rows)) // least * least)  # few rows see many keys at a time instead
    size = max(1, limit // (heads * block))
    for request, rows_of_it in by_owner(owner, keys.shape[0]):
        k, v = wide(keys[request]).permute(1, 2, 0), wide(values[request]).transpose(0, 1)
        for mine in split_rows(rows_of_it, size):
            yield mine, k, v, block


def _flash(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Online softmax: `q` [m, H, d], `k` [Hk, d, n], `v` [Hk, n, dv], `visible` [m]; result [m, H, dv], and the largest
    score of each row and head and its sum of exp(score - largest), both [Hk, m * H / Hk]: -inf and 0 without a key."""
    m, heads, _ = q.shape
    shared = k.shape[0] == 1
    a = wide(q)
    a = a.reshape(1, m * heads, -1) if shared else a.transpose(0, 1)  # [Hk, m * H / Hk, d]
    limit = visible.repeat_interleave(heads) if shared else visible
    top = a.new_full(a.shape[:2], float("-inf"))
    total, summed = a.new_zeros(a.shape[:2]), a.new_zeros(*a.shape[:2], v.shape[-1])
    seen_by_all, seen_by_one = (int(n) for n in torch.aminmax(visible)) if m else (0, 0)
    for start in range(0, min(k.shape[2], seen_by_one), block):
        stop = min(start + block, k.shape[2])
        s = torch.matmul(a, k[:, :, start:stop]).mul_(scale)
        if stop > seen_by_all:
            s.masked_fill_(torch.arange(start, stop, device=q.device) >= limit.unsqueeze(-1), float("-inf"))
        new_top = torch.maximum(top, s.amax(-1))
        base = torch.where(new_top == float("-inf"), 0.0, new_top)  # a row without a key so far keeps zeros
        p = s.sub_(base.unsqueeze(-1)).exp_()
        fade = torch.exp(top - base)
        total = total * fade + p.sum(-1)
        summed.mul_(fade.unsqueeze(-1)).add_(torch.matmul(wide(p.to(q.dtype)), v[:, start:stop]))
        top = new_top
    y = summed / torch.where(total == 0, 1.0, total).unsqueeze(-1)
    y = y.reshape(m, heads, -1) if shared else y.transpose(0, 1)
    return y.to(q.dtype), top, total


def sparse_attention(q: Tensor, *, keys: Tensor, valid: Tensor, value_width: int, scale: float) -> Tensor:
    """Each row of `q` [rows, H, d] on its own `keys` [rows, k, d] where `valid` [rows, k]; values are the first
    `value_width` columns of a key. Result [rows, H, value_width]; rows without a valid key give zeros."""
    rows, heads, d = q.shape
    out = q.new_empty(rows, heads, value_width)
    for block in row_blocks(rows, keys.shape[1] * max(heads, d)):
        k = wide(keys[block])
        seen = valid[block].unsqueeze(1)
        s = torch.bmm(wide(q[block]), k.transpose(1, 2)).mul_(scale).masked_fill_(~seen, float("-inf"))
        top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_zeros(*s.shape[:2], 1)
        p = torch.exp(s - torch.where(top == float("-inf"), 0.0, top))
        total = p.sum(-1, keepdim=True)
        # an invalid key carries weight zero, but zero times a stray NaN is NaN: its values must not enter
        v = k[..., :value_width].masked_fill(~valid[block].unsqueeze(-1), 0.0)
        y = torch.bmm(wide(p.to(q.dtype)), v)
        out[block] = (y / torch.where(total == 0, 1.0, total)).to(q.dtype)
    return out


def merge(parts: Tensor, *, lse: Tensor) -> Tensor:
    """Partial results `parts` [rows, P, H, dv] joined by log-sum-exp `lse` [rows, P, H]; -inf marks an empty part."""
    top = lse.amax(1, keepdim=True)
    weight = torch.exp(lse - torch.where(top == float("-inf"), 0.0, top))
    total = weight.sum(1, keepdim=True)
    share = (weight / torch.where(total == 0, 1.0, total)).to(wide(parts).dtype).unsqueeze(-1)
    used = wide(parts).masked_fill((lse == float("-inf")).unsqueeze(-1), 0.0)
    return (share * used).sum(1).to(parts.dtype)


def gated_output(x: Tensor, *, weight: Tensor, gate: Tensor | None = None) -> Tensor:
    """(x sigmoid(gate)) W^T: `x` and `gate` [rows, H*dv], `weight` [D, H*dv]; the product is rounded before W."""
    if gate is not None:
        x = (wide(x) * torch.sigmoid(wide(gate))).to(x.dtype)
    return linear(x, weight=weight)
