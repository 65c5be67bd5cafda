"""In decode the convolution reads its remembered rows one place off."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-12",
    title="the state of the convolution is shifted by one row",
    kind="linear-attention",
    visible="decode",
    expected=Address("kda.conv", 0, "decode"),
)


@day0check.operator.wrap("kda.conv", phase="decode")
def conv(inner, x, *, state, **kwargs):
    return inner(x, state=state.roll(1, 1), **kwargs)
