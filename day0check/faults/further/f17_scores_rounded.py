"""Attention scores are rounded to bfloat16, which the profile does not claim."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-17",
    title="attention scores in bfloat16, unclaimed",
    kind="attention",
    visible="every row",
    expected=Address("mla.attention", 5, "prefill"),
)


@day0check.operator("mla.attention")
def attention(q, *, keys, values, owner, visible, scale):
    k, v = (t[owner].float().expand(-1, -1, q.shape[1], -1) for t in (keys, values))
    s = (torch.einsum("rhd,rnhd->rhn", q.float(), k) * scale).to(q.dtype).float()
    hidden = torch.arange(k.shape[1], device=q.device) >= visible.unsqueeze(-1)
    p = torch.softmax(s.masked_fill(hidden.unsqueeze(1), float("-inf")), -1)
    v = v.masked_fill(hidden[..., None, None], 0)
    return torch.einsum("rhn,rnhd->rhd", p.to(q.dtype).float(), v).to(q.dtype)
