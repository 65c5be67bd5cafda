"""Attention of query heads in groups that share a key head: one matrix product a group, P in the activation type."""

from __future__ import annotations

import torch
from torch import Tensor

from day0check.accelerated.ops.arithmetic import row_blocks, wide


def grouped_attention(
    q: Tensor, *, keys: Tensor, values: Tensor, owner: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """Each row of `q` [rows, H, d] on the first `visible` [rows] keys of its own request.

    `keys` [batch, n, Hk, d] and `values` [batch, n, Hk, dv], H / Hk neighbouring query heads to a key head; `owner`
    [rows], -1 = padding. Result [rows, H, dv] in the type of `q`; a row that sees no key gives zeros.
    """
    out = q.new_zeros(*q.shape[:2], values.shape[-1])
    for request in range(keys.shape[0]):
        mine = (owner == request).nonzero().squeeze(1)
        if not len(mine):
            continue
        n = min(keys.shape[1], int(visible[mine].max()))
        k, v = wide(keys[request, :n]).permute(1, 2, 0), wide(values[request, :n]).transpose(0, 1)
        for block in row_blocks(len(mine), q.shape[1] * max(1, n)):
            rows = mine[block]
            out[rows] = _block(q[rows], k, v, visible[rows], scale)
    return out


def _block(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """`q` [m, H, d], `k` [Hk, d, n], `v` [Hk, n, dv], `visible` [m]; result [m, H, dv]."""
    rows, heads, d = q.shape
    groups, _, n = k.shape
    if not n:
        return q.new_zeros(rows, heads, v.shape[-1])
    a = wide(q).view(rows, groups, heads // groups, d).permute(1, 2, 0, 3).reshape(groups, -1, d)
    s = torch.matmul(a, k).mul_(scale).view(groups, -1, rows, n)
    s.masked_fill_(torch.arange(n, device=q.device) >= visible.unsqueeze(1), float("-inf"))
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - torch.where(top == float("-inf"), 0.0, top))  # a row without a key keeps zeros
    total = p.sum(-1, keepdim=True)
    y = torch.matmul(wide(p.to(q.dtype)).view(groups, -1, n), v).view(groups, -1, rows, v.shape[-1])
    y = y / torch.where(total == 0, 1.0, total)
    return y.permute(2, 0, 1, 3).reshape(rows, heads, -1).to(q.dtype)
