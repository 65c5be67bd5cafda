"""States of linear attention are kept in bfloat16, as claimed, but cut off instead of rounded."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-53",
    title="states in bfloat16 are truncated",
    kind="linear-attention",
    visible="everywhere",
    expected=Address("kda.attention", 0, "prefill"),
    profile="bf16-states",
)


@day0check.operator.wrap("kda.attention")
def attention(inner, q, **kwargs):
    y, state = inner(q, **kwargs)
    return y, (state.float().view(torch.int32) & -65536).view(torch.float32)
