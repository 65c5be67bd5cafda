"""A row takes a value of the next request of its batch."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-39",
    title="one request reads the state of its neighbour",
    kind="linear-attention",
    visible="two or more requests in one step",
    expected=Address("state.load", 0, "decode"),
    case="batch",
)


@day0check.operator.wrap("state.load", phase="decode")
def load(inner, pool, *, slots):
    return inner(pool, slots=slots.roll(1, 0) if pool.dim() == 4 else slots)
