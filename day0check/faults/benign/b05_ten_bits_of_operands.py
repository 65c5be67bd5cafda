"""Products of attention read ten bits of the mantissa of their operands, as TF32 units do: bfloat16 ones lose nothing,
and the probabilities keep two bits more than bfloat16 has."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-05",
    title="products through TF32 units",
    kind="attention",
    visible="last bits",
    expected=None,
)

TEN_BITS = -8192


def ten_bits(x):
    return ((x.float().contiguous().view(torch.int32) + 4096) & TEN_BITS).view(torch.float32)


def softmax(s):
    top = s.amax(-1, keepdim=True).clamp(min=-1e30)
    p = torch.exp(s - top)
    return p, p.sum(-1, keepdim=True).clamp(min=1e-30)


@day0check.operator("dsa.attention")
def sparse(q, *, keys, valid, value_width, scale):
    keys = keys.masked_fill(~valid.unsqueeze(-1), 0)
    s = torch.einsum("rhd,rkd->rhk", ten_bits(q), ten_bits(keys)) * scale
    p, total = softmax(s.masked_fill(~valid.unsqueeze(1), float("-inf")))
    return (torch.einsum("rhk,rkv->rhv", ten_bits(p), ten_bits(keys[..., :value_width])) / total).to(q.dtype)


@day0check.operator("mla.attention")
def dense(q, *, keys, values, owner, visible, scale):
    keys, values = (t.expand(-1, -1, q.shape[1], -1)[owner.clamp(min=0)] for t in (keys, values))
    s = torch.einsum("rhd,rnhd->rhn", ten_bits(q), ten_bits(keys)) * scale
    hidden = torch.arange(keys.shape[1], device=q.device) >= visible.unsqueeze(-1)
    p, total = softmax(s.masked_fill(hidden.unsqueeze(1), float("-inf")))
    return (torch.einsum("rhn,rnhv->rhv", ten_bits(p), ten_bits(values)) / total).to(q.dtype)


@day0check.operator("mla.query")
@day0check.operator("mla.latent")
@day0check.operator("mla.gate")
@day0check.operator("kda.project")
@day0check.operator("dsa.index_query")
def linear(x, *, weight):
    return (ten_bits(x) @ ten_bits(weight).T).to(x.dtype)
