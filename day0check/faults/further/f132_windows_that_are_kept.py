"""The convolution of linear attention keeps the rows of every call, for a backward pass that never comes."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-132",
    title="every input of the convolution is kept",
    kind="memory",
    visible="memory over length and calls; every result is right",
    expected=Address("kda.conv", 0, "prefill"),
    case="cost",
)

_kept = []


@day0check.operator.wrap("kda.conv")
def conv(inner, x, **kwargs):
    _kept.append(x.clone())
    return inner(x, **kwargs)
