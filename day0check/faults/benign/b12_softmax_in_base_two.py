"""Softmax with powers of two."""

import math

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-12",
    title="softmax in base 2",
    kind="attention",
    visible="last bits",
    expected=None,
)


@day0check.operator("dsa.attention")
def attention(q, *, keys, valid, value_width, scale):
    s = torch.einsum("rhd,rkd->rhk", q.float(), keys.float()) * (scale * math.log2(math.e))
    s = s.masked_fill(~valid.unsqueeze(1), float("-inf"))
    p = torch.exp2(s - s.amax(-1, keepdim=True).clamp(min=-1e30))
    values = keys[..., :value_width].float().masked_fill(~valid.unsqueeze(-1), 0)
    y = torch.einsum("rhk,rkv->rhv", p.to(q.dtype).float(), values)
    return (y / p.sum(-1, keepdim=True).clamp(min=1e-30)).to(q.dtype)
