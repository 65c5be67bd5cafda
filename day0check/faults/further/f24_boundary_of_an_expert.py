"""The border between two experts is one pair too late."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-24",
    title="one pair goes to the neighbouring expert",
    kind="routing",
    visible="one pair of the step",
    expected=Address("moe.dispatch", 1, "prefill"),
)


@day0check.operator.wrap("moe.dispatch", phase="prefill")
def dispatch(inner, x, **kwargs):
    pairs, order, active, offsets = inner(x, **kwargs)
    offsets[1] += 1
    return pairs, order, active, offsets
