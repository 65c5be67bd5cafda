"""Keys are padded on the left to whole blocks of 32 and masked: rows are longer, and their sums run elsewhere."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-19",
    title="left padding behind an attention mask",
    kind="attention",
    visible="last bits",
    expected=None,
)

BLOCK = 32
LEFT_THERE = 7.0


def padded(x, axis):
    shape = list(x.shape)
    shape[axis] = -shape[axis] % BLOCK + BLOCK
    return torch.cat((x.new_full(shape, LEFT_THERE), x), axis)


def masked_softmax(s, seen):
    s = s.masked_fill(~seen, float("-inf"))
    p = torch.exp(s - s.amax(-1, keepdim=True).clamp(min=-1e30))
    return p, p.sum(-1, keepdim=True).clamp(min=1e-30)


@day0check.operator("dsa.attention")
def sparse(q, *, keys, valid, value_width, scale):
    keys = padded(keys.masked_fill(~valid.unsqueeze(-1), 0), 1).float()
    seen = torch.nn.functional.pad(valid, (keys.shape[1] - valid.shape[1], 0)).unsqueeze(1)
    p, total = masked_softmax(torch.einsum("rhd,rkd->rhk", q.float(), keys) * scale, seen)
    y = torch.einsum("rhk,rkv->rhv", p.to(q.dtype).float(), keys[..., :value_width])
    return (y / total).to(q.dtype)


@day0check.operator("mla.attention")
def dense(q, *, keys, values, owner, visible, scale):
    number = keys.shape[1]
    keys, values = (padded(t, 1).expand(-1, -1, q.shape[1], -1)[owner.clamp(min=0)].float() for t in (keys, values))
    at = torch.arange(keys.shape[1], device=q.device) - (keys.shape[1] - number)
    seen = ((at >= 0) & (at < visible.unsqueeze(-1))).unsqueeze(1)
    p, total = masked_softmax(torch.einsum("rhd,rnhd->rhn", q.float(), keys) * scale, seen)
    return (torch.einsum("rhn,rnhv->rhv", p.to(q.dtype).float(), values) / total).to(q.dtype)
