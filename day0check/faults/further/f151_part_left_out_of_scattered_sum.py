"""Where sums are scattered, each rank sums the parts of its rows without that of the last rank."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-151",
    title="one rank's part is left out of scattered sums",
    kind="ranks",
    visible="prompts of at least as many rows as there are ranks",
    expected=Address("comm.reduce_scatter", 0, "prefill"),
    layout={"tensor_parallel": 2, "sums": "reduce_scatter"},
)


@day0check.operator.wrap("comm.reduce_scatter")
def sums(inner, parts):
    return inner(parts[:, :-1])
