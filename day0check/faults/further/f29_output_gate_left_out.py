"""Attention is not multiplied by its output gate."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-29",
    title="the output gate of attention is left out",
    kind="attention",
    visible="every row",
    expected=Address("mla.output", 3, "prefill"),
)


@day0check.operator.wrap("mla.output")
def output(inner, x, *, gate, **kwargs):
    return inner(x, gate=None, **kwargs)
