"""Attention in three parts of the keys, merged in float32."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-03",
    title="split keys, merged in float32",
    kind="attention",
    visible="last bits",
    expected=None,
)

PARTS = 3


@day0check.operator("dsa.attention")
def attention(q, *, keys, valid, value_width, scale):
    s = torch.einsum("rhd,rkd->rhk", q.float(), keys.float()) * scale
    s = s.masked_fill(~valid.unsqueeze(1), float("-inf"))
    values = keys[..., :value_width].float().masked_fill(~valid.unsqueeze(-1), 0)
    total, summed = 0, 0
    top = s.amax(-1, keepdim=True).clamp(min=-1e30)
    for part in torch.arange(s.shape[-1], device=q.device).chunk(PARTS):
        local = s[..., part].amax(-1, keepdim=True).clamp(min=-1e30)
        p = torch.exp(s[..., part] - local)
        fade = torch.exp(local - top)
        total = total + fade * p.sum(-1, keepdim=True)
        summed = summed + fade * torch.einsum("rhk,rkv->rhv", p.to(q.dtype).float(), values[:, part])
    return (summed / total.clamp(min=1e-30)).to(q.dtype)
