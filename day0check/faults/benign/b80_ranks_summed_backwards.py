"""Parts of ranks are summed from the last one to the first: another order, the same float32 sums."""

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-80",
    title="ranks are summed in another order",
    kind="ranks",
    visible="three ranks and more; heads that do not come out even",
    expected=None,
    layout={"tensor_parallel": 3, "expert_parallel": 3},
)


@day0check.operator("comm.all_reduce")
def all_reduce(parts):
    total = parts[:, -1].float()
    for rank in range(parts.shape[1] - 2, -1, -1):
        total = total + parts[:, rank].float()
    return total.to(parts.dtype)
