"""The partial rotary factor of the linear layers is applied to the rotary head of the full ones."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-46",
    title="half of the rotary channels of latent attention are left as they are",
    kind="rope",
    source="vllm PR 41185",
    visible="the few full-attention layers of a hybrid",
    expected=Address("rope.apply", 3, "prefill"),
)


@day0check.operator.wrap("rope.apply")
def rope(inner, x, *, layout, **kwargs):
    if layout != "interleaved":
        return inner(x, layout=layout, **kwargs)
    half = x.shape[-1] // 2
    return torch.cat((inner(x[..., :half].contiguous(), layout=layout, **kwargs), x[..., half:]), -1)
