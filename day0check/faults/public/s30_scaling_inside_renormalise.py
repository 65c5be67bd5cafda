"""The routed scaling factor is applied inside the branch that renormalises."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-30",
    title="without renormalisation the routed scaling factor is left out",
    kind="routing",
    source="sglang-jax PR 1282, sglang PR 31449",
    visible="models whose router does not renormalise",
    expected=Address("moe.route", 1, "prefill"),
    model="fault-moe",
)


@day0check.operator.wrap("moe.route")
def route(inner, scores, *, renormalise, scale, **kwargs):
    return inner(scores, renormalise=renormalise, scale=scale if renormalise else 1.0, **kwargs)
