"""The compressor works with the padded length of a sequence: padding enters its last window."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-20",
    title="padding enters the last compressed key of a prompt",
    kind="phases",
    source="GDzhu01/vllm-ascend-deepseekv4 issue 76",
    visible="as soon as the first window closes",
    expected=Address("dsa.pool_key", 3, "prefill"),
    model="fault-pools",
    case="pools",
)


@day0check.operator.wrap("dsa.pool_key", phase="prefill")
def pool_key(inner, keys, *, gates, ape):
    keys, gates = keys.clone(), gates.clone()
    keys[-1, -1] = gates[-1, -1] = 0
    return inner(keys, gates=gates, ape=ape)
