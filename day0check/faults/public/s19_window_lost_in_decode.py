"""In decode a compressed key is made without the window before its own: zeros stand in its place."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-19",
    title="compressed keys that close in decode lack the window before them",
    kind="phases",
    source="jundot/omlx PR 2271",
    visible="every window that closes during decode; prefill is right",
    expected=Address("dsa.pool_key", 3, "decode"),
    model="fault-pools",
    case="pools",
)


@day0check.operator.wrap("dsa.pool_key", phase="decode")
def pool_key(inner, keys, *, gates, ape):
    keys, gates = keys.clone(), gates.clone()
    keys[:, : keys.shape[1] // 2] = 0
    gates[:, : keys.shape[1] // 2] = 0
    return inner(keys, gates=gates, ape=ape)
