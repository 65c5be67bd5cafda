"""In one row the last 32 columns do not enter the router scores."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-34",
    title="the last 32 columns are lost in one row",
    kind="routing",
    visible="one row",
    expected=Address("moe.scores", 1, "prefill", position=41),
)

ROW, LOST = 41, 32


@day0check.operator.wrap("moe.scores", phase="prefill")
def scores(inner, x, **kwargs):
    x = x.clone()
    x[ROW, -LOST:] = 0
    return inner(x, **kwargs)
