"""One row may see the key after its own."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-30",
    title="one row selects one key of its future",
    kind="index",
    visible="one row",
    expected=Address("dsa.select", 3, "prefill", position=70),
)

ROW = 70


@day0check.operator.wrap("dsa.select", phase="prefill")
def select(inner, scores, **kwargs):
    found = inner(scores, **kwargs)
    found[ROW, -1] = ROW + 1
    return found
