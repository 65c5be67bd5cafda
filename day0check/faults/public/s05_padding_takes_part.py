"""The length of the index list is not handed on: its padding takes part in the attention."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-05",
    title="padded entries of a short selection take part in the attention",
    kind="attention",
    source="vllm PR 36616",
    visible="while the context is shorter than the selection",
    expected=Address("dsa.attention", 3, "prefill"),
    differs="the padding holds zeros, not the first token",
)


@day0check.operator.wrap("dsa.attention")
def attention(inner, q, *, valid, **kwargs):
    return inner(q, valid=torch.ones_like(valid), **kwargs)
