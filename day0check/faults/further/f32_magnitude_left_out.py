"""The ratio of the two magnitude scales does not reach cosine and sine."""

import dataclasses

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-32",
    title="the rotary table lacks the ratio of the magnitude scales",
    kind="rope",
    visible="every position",
    expected=Address("rope.apply", 0, "prefill"),
    model="fault-dsa",
)


@day0check.operator.wrap("rope.apply")
def rope(inner, x, *, yarn, **kwargs):
    even = None if yarn is None else dataclasses.replace(yarn, mscale=yarn.mscale_all_dim)
    return inner(x, yarn=even, **kwargs)
