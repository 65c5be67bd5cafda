"""The weights of the index heads lack their factor HI^-1/2."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-28",
    title="index head weights lack their factor",
    kind="index",
    visible="every score, in the same proportion: no selection changes",
    expected=Address("dsa.index_weights", 3, "prefill"),
)


@day0check.operator.wrap("dsa.index_weights")
def weights(inner, x, *, weight):
    return inner(x, weight=weight) * weight.shape[0] ** 0.5
