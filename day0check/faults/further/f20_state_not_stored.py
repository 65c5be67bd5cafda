"""In decode the state of linear attention is not written back."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-20",
    title="the state is not stored in decode",
    kind="linear-attention",
    visible="from the second decode step on",
    expected=Address("state.store", 0, "decode"),
)


@day0check.operator.wrap("state.store", phase="decode")
def store(inner, pool, *, value, slots):
    if value.dim() != 4:
        inner(pool, value=value, slots=slots)
