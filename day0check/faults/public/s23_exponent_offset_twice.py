"""An exponent offset of -2 is applied a second time."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-23",
    title="the exponent offset of the scales is applied twice: weights four times too small",
    kind="quantisation",
    source="vllm PR 35979, compressed-tensors 538 and 541",
    visible="every quantised weight",
    expected=Address("moe.convert", 1, "prefill"),
)


@day0check.operator.wrap("moe.convert")
def convert(inner, packed, *, scale, **kwargs):
    return inner(packed, scale=scale - 2, **kwargs)
