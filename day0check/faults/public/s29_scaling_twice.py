"""The routed scaling factor is applied by the router and again where experts are summed."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-29",
    title="the routed scaling factor is applied twice",
    kind="routing",
    source="vllm PR 45037",
    visible="every token",
    expected=Address("moe.combine", 1, "prefill"),
)
ROUTED_SCALING_FACTOR = 2.5


@day0check.operator.wrap("moe.combine")
def combine(inner, y, **kwargs):
    return inner(y, **kwargs) * ROUTED_SCALING_FACTOR
