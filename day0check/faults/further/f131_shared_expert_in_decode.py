"""The decode kernel of the shared expert reads its second matrix at a scale one percent too large."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-131",
    title="the up projection of the shared expert is one percent too large in decode",
    kind="phases",
    visible="decode alone",
    expected=Address("moe.shared", 1, "decode"),
)


@day0check.operator.wrap("moe.shared", phase="decode")
def shared(inner, x, *, up, **kwargs):
    return inner(x, up=(up.float() * 1.01).to(up.dtype), **kwargs)
