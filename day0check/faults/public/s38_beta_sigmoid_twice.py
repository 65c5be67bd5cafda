"""The decode path applies the sigmoid of beta once more; its prefill is right."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-38",
    title="sigmoid twice on beta, in decode",
    kind="linear-attention",
    source="sglang PR 17508",
    visible="decode alone",
    expected=Address("kda.gates", 0, "decode"),
)


@day0check.operator.wrap("kda.gates", phase="decode")
def gates(inner, f, **kwargs):
    g, beta = inner(f, **kwargs)
    return g, torch.sigmoid(beta)
