"""The cache knows of a snapshot, but nobody wrote the states into it."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-34",
    title="the snapshot that a hit restores was never written",
    kind="linear-attention",
    source="sglang PR 31474",
    visible="where states are kept; wrong answers after a hit alone",
    expected=Address("prefix.store", 0, "prefill"),
    case="prefix",
)


@day0check.operator("prefix.store")
def store(pool, *, value, slots):
    return None
