"""In decode, the scale of one block of FP8 activations is two percent too large."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-85",
    title="one scale of FP8 rows two percent too large in decode",
    kind="quantisation",
    visible="one block of one row",
    expected=Address("quantise.rows", 0, "decode"),
    profile="fp8-activations",
)


@day0check.operator.wrap("quantise.rows", phase="decode")
def rows(inner, x):
    codes, scale = inner(x)
    scale = scale.clone()
    scale[0, 0] *= 1.02
    return codes, scale
