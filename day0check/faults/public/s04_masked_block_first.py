"""An online softmax that starts at -inf meets a whole block of absent keys first."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-04",
    title="a leading block of absent keys poisons the running maximum",
    kind="attention",
    source="vllm PR 48366",
    visible="rows that see fewer keys than the selection keeps, when the absent ones come first (which is legal)",
    expected=Address("dsa.attention", 3, "prefill"),
)
BLOCK = 16


@day0check.operator.wrap("dsa.select")
def select(inner, scores, **kwargs):
    return inner(scores, **kwargs).sort(-1).values


@day0check.operator("dsa.attention")
def attention(q, *, keys, valid, value_width, scale):
    s = torch.einsum("rhd,rkd->rhk", q.float(), keys.float()) * scale
    s = s.masked_fill(~valid.unsqueeze(1), float("-inf"))
    values = keys[..., :value_width].float()
    top = torch.full_like(s[..., 0], float("-inf"))
    total, summed = torch.zeros_like(top), q.new_zeros(*q.shape[:2], value_width, dtype=torch.float32)
    for start in range(0, s.shape[-1], BLOCK):
        block = slice(start, start + BLOCK)
        new_top = torch.maximum(top, s[..., block].amax(-1))
        p, fade = torch.exp(s[..., block] - new_top.unsqueeze(-1)), torch.exp(top - new_top)
        total = total * fade + p.sum(-1)
        part = torch.einsum("rhk,rkv->rhv", p.to(q.dtype).float(), values[:, block])
        summed, top = summed * fade.unsqueeze(-1) + part, new_top
    return (summed / total.unsqueeze(-1)).to(q.dtype)
