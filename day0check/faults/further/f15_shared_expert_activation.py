"""The shared expert uses the plain SiLU where the model has a bounded activation."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-15",
    title="the shared expert has another activation",
    kind="experts",
    visible="large gates",
    expected=Address("moe.shared", 1, "prefill"),
)


@day0check.operator.wrap("moe.shared")
def shared(inner, x, *, activation, **kwargs):
    return inner(x, activation="silu", **kwargs)
