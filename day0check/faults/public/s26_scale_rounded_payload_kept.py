"""Block scales are rounded up for the kernel; the payload is not quantised again."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-26",
    title="a block takes the larger of its scales, the payload stays as it was",
    kind="quantisation",
    source="transformers issue 47030, sglang issue 39193",
    visible="blocks whose scales differ",
    expected=Address("moe.convert", 1, "prefill"),
    differs="the largest of the block's four MXFP4 exponents stands for the scale rounded up",
)


@day0check.operator.wrap("moe.convert")
def convert(inner, packed, *, scale, experts, **kwargs):
    payload, block_scale, inexact = inner(packed, scale=scale, experts=experts, **kwargs)
    largest = scale.index_select(0, experts).amax(-1, keepdim=True).float()
    smallest = scale.index_select(0, experts).amin(-1, keepdim=True).float()
    block_scale.mul_((largest - smallest).exp2())
    return payload, block_scale, inexact
