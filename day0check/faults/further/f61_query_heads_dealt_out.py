"""Query heads are dealt out to the key heads one by one, where neighbours share one."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-61",
    title="query head h reads key head h mod Hk",
    kind="attention",
    visible="everywhere, with more than one key head and fewer than queries",
    expected=Address("gqa.attention", 1, "prefill"),
    model="fault-gqa",
)


@day0check.operator.wrap("gqa.attention")
def attention(inner, q, *, keys, **kwargs):
    groups = keys.shape[2]
    dealt = q.unflatten(1, (-1, groups)).transpose(1, 2).flatten(1, 2)
    found = inner(dealt, keys=keys, **kwargs)
    return found.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
