"""Slots are computed from the position in the chunk in place of that in the sequence."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-11",
    title="the slots of a continued prefill count from the begin of the chunk",
    kind="cache",
    source="vllm PR 36580",
    visible="the second and later chunks of a prompt",
    expected=Address("kv.slots", None, "prefill"),
    case="chunks",
    differs="our reconstruction: the report gives no detail",
)


@day0check.operator.wrap("kv.slots", phase="prefill")
def slots(inner, table, *, positions, **kwargs):
    return inner(table, positions=positions - positions.min(), **kwargs)
