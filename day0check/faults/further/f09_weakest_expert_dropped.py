"""The weakest of the chosen experts does not enter the sum."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-09",
    title="the weakest assignment of every token is dropped",
    kind="routing",
    visible="every token",
    expected=Address("moe.combine", 1, "prefill"),
)


@day0check.operator.wrap("moe.combine")
def combine(inner, y, *, order, weights):
    return inner(y, order=order, weights=weights.masked_fill(weights == weights.amin(-1, keepdim=True), 0))
