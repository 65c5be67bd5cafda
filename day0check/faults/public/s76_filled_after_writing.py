"""The fill of the output runs on another stream, and after the kernel that writes it."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-76",
    title="the output is filled with NaN after it was written",
    kind="memory",
    source="DeepEP issue 589",
    visible="by the order of two streams",
    expected=Address("moe.combine", 1, "prefill"),
    differs="always the wrong order",
)


@day0check.operator.wrap("moe.combine")
def combine(inner, y, **kwargs):
    out = inner(y, **kwargs)
    out[out.shape[0] // 2 :] = float("nan")
    return out
