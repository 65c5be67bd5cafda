"""One rank gets a row of what the others gave with the bytes of the row before; what it computes from that is right."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-95",
    title="a gathered row is that of its neighbour, on one rank",
    kind="ranks",
    visible="the first sum over ranks of a prompt",
    expected=Address("comm.all_gather", 0, "prefill", request="a", position=3),
    layout={"tensor_parallel": 2},
)

_calls = []


@day0check.operator.wrap("comm.all_gather")
def gather(inner, x, *, group, axis, sizes):
    y = inner(x, group=group, axis=axis, sizes=sizes)
    _calls.append(axis)
    if group.rank == 1 and len(_calls) == 1:
        y = y.clone()
        y[3] = y[2]
    return y
