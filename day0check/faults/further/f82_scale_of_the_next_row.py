"""A projection on FP8 rows multiplies by the scale of the row before."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-82",
    title="scales of FP8 rows read one row back",
    kind="quantisation",
    visible="rows of different size",
    expected=Address("kda.project", 0, "prefill"),
    profile="fp8-activations",
)


@day0check.operator.wrap("kda.project")
def project(inner, x, *, x_scale=None, **kwargs):
    return inner(x, x_scale=None if x_scale is None else x_scale.roll(1, 0), **kwargs)
