"""The convolution leaves its oldest tap out in the first row of a request."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-13",
    title="one tap is missing in one row",
    kind="linear-attention",
    visible="the first rows after a state",
    expected=Address("kda.conv", 0, "prefill"),
    differs="a row in the middle, where there are rows before it",
)


@day0check.operator.wrap("kda.conv", phase="prefill")
def conv(inner, x, *, weight, offsets, **kwargs):
    y, state = inner(x, weight=weight, offsets=offsets, **kwargs)
    short = weight.clone()
    short[:, 0] = 0
    row = int(offsets[1]) // 2
    y[row] = inner(x, weight=short, offsets=offsets, **kwargs)[0][row]
    return y, state
