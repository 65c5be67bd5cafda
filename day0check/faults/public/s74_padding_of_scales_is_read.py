"""Experts with few rows read the padding of the scale buffer: stale bytes, some of them NaN."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-74",
    title="padding of the scale buffer reaches experts with few rows",
    kind="memory",
    source="vllm PR 38148",
    visible="experts with few tokens, as in decode",
    expected=Address("moe.experts", 1, "decode"),
)

FEW = 4


@day0check.operator.wrap("moe.experts", phase="decode")
def experts(inner, x, *, offsets, **kwargs):
    y = inner(x, offsets=offsets, **kwargs)
    counts = offsets.diff()
    y[(counts <= FEW).repeat_interleave(counts), 0] = float("nan")
    return y
