"""A row adds its experts from the last choice to the first."""

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-25",
    title="experts are summed in another order",
    kind="experts",
    visible="last bits",
    expected=None,
)


@day0check.operator.wrap("moe.combine")
def combine(inner, y, *, order, weights):
    k = weights.shape[1]
    mirrored = order // k * k + (k - 1 - order % k)
    return inner(y, order=mirrored, weights=weights.flip(-1))
