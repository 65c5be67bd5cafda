"""The kernel of a projection takes a scale twice as large for one block of 32 weights of a row."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-145",
    title="one block of 32 weights of a projection is read at twice its scale",
    kind="quantisation",
    visible="one column of the result, where the input of the block is large",
    expected=Address("mla.query", 3, "prefill"),
)


@day0check.operator.wrap("mla.query")
def query(inner, x, *, weight, **kwargs):
    weight = weight.clone()
    weight[5, 32:64] *= 2
    return inner(x, weight=weight, **kwargs)
