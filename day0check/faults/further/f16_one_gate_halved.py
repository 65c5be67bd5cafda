"""The decay of one head is half of what it should be."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-16",
    title="the decay of one head is halved",
    kind="linear-attention",
    visible="every row, in one head",
    expected=Address("kda.gates", 0, "prefill"),
)


@day0check.operator.wrap("kda.gates")
def gates(inner, f, **kwargs):
    g, beta = inner(f, **kwargs)
    g[:, 2] *= 0.5
    return g, beta
