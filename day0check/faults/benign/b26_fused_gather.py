"""One kernel gathers its keys and attends to them."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-26",
    title="gather and attention in one kernel",
    kind="cache",
    visible="last bits",
    expected=None,
)


@day0check.operator("dsa.attention", covers=("kv.gather", "dsa.attention"))
def attention(q, *, pool, table, owner, indices, value_width, scale):
    page = pool.shape[1]
    wanted, valid = indices.long().clamp(min=0), indices >= 0
    slots = table[owner.unsqueeze(1), wanted // page] * page + wanted % page
    keys = pool.flatten(0, 1)[slots].float().masked_fill(~valid.unsqueeze(-1), 0)
    s = torch.einsum("rhd,rkd->rhk", q.float(), keys) * scale
    s = s.masked_fill(~valid.unsqueeze(1), float("-inf"))
    p = torch.exp(s - s.amax(-1, keepdim=True).clamp(min=-1e30))
    y = torch.einsum("rhk,rkv->rhv", p.to(q.dtype).float(), keys[..., :value_width])
    return (y / p.sum(-1, keepdim=True).clamp(min=1e-30)).to(q.dtype)
