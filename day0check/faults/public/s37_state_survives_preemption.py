"""A request that was preempted begins again from the state in which it was interrupted."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-37",
    title="after a preemption the prompt begins from the old state",
    kind="linear-attention",
    source="vllm-metal issue 488",
    visible="after a preemption alone",
    expected=Address("state.load", 0, "prefill"),
    case="preempt",
)
_last = []  # (pool, slots) of every store


@day0check.operator.wrap("state.store")
def store(inner, pool, *, value, slots):
    _last.append((pool, slots))
    return inner(pool, value=value, slots=slots)


@day0check.operator.wrap("state.load")
def load(inner, pool, *, slots):
    old = next((s for p, s in reversed(_last) if p is pool), None)
    return inner(pool, slots=old if old is not None and bool((slots < 0).all()) else slots)
