"""The state that leaves a chunk lacks the decay of its last token."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-05",
    title="the decay of a chunk is one token short",
    kind="linear-attention",
    visible="chunks whose last token decays strongly",
    expected=Address("kda.attention", 0, "prefill"),
    differs="the last token is written as if it decayed less, too",
)


@day0check.operator.wrap("kda.attention", phase="prefill")
def attention(inner, q, *, g, offsets, **kwargs):
    y, state = inner(q, g=g, offsets=offsets, **kwargs)
    last = g[offsets[1:] - 1]  # the decay that the state has and should not have, in this fault
    return y, state * torch.exp(-last).unsqueeze(-1)
