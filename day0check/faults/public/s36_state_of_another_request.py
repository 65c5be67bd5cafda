"""The third request of a step writes its state into the row of the first."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-36",
    title="three requests: the third writes its state over that of the first",
    kind="linear-attention",
    source="ik_llama.cpp issue 1932",
    visible="three or more requests in one step",
    expected=Address("state.store", 0, "prefill"),
    case="batch",
)


@day0check.operator.wrap("state.store")
def store(inner, pool, *, value, slots):
    if len(slots) >= 3 and value.dim() == 4:
        slots = slots.clone()
        slots[2] = slots[0]
    return inner(pool, value=value, slots=slots)
