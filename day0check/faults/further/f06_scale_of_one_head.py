"""The softmax scale of one head is 0.2% too large."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-06",
    title="softmax scale of one head times 1.002",
    kind="attention",
    visible="every row, in one head",
    expected=Address("dsa.attention", 3, "prefill"),
)

HEAD = 1


@day0check.operator.wrap("dsa.attention")
def attention(inner, q, *, keys, **kwargs):
    scaled = q.float()
    scaled[:, HEAD] *= 1.002
    return inner(scaled, keys=keys.float(), **kwargs).to(q.dtype)
