"""Cosine and sine carry the whole magnitude scale in place of a ratio that is 1."""

import math

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-44",
    title="the rotary table carries the magnitude scale itself, not its ratio",
    kind="rope",
    source="kekzl/imp PR 880",
    visible="the rotary part of queries and keys, every position",
    expected=Address("rope.apply", 0, "prefill"),
    model="tiny-deepseek-v3.2",
)


@day0check.operator.wrap("rope.apply")
def rope(inner, x, *, yarn, **kwargs):
    turned = inner(x, yarn=yarn, **kwargs)
    return turned if yarn is None else (turned.float() * (0.1 * yarn.mscale * math.log(yarn.factor) + 1)).to(x.dtype)
