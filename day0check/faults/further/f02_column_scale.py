"""One output column of a linear layer is 0.4% too large."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-02",
    title="one output column times 1.004",
    kind="index",
    visible="every row, in one column",
    expected=Address("dsa.index_query", 3, "prefill"),
)

COLUMN = 5


@day0check.operator.wrap("dsa.index_query")
def query(inner, x, *, weight, **kwargs):
    wide = weight.float()
    wide[COLUMN] *= 1.004
    return inner(x.float(), weight=wide, **kwargs).to(x.dtype)
