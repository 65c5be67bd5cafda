"""Decode rotates at the position after the one of its token."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-23",
    title="decode rotates one position too far",
    kind="rope",
    visible="decode",
    expected=Address("rope.apply", 3, "decode"),
)


@day0check.operator.wrap("rope.apply", phase="decode")
def rope(inner, x, *, positions, **kwargs):
    return inner(x, positions=positions + 1, **kwargs)
