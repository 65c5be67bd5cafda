"""The gate of the fast attention kernel knows one head layout; others do twice the work past a threshold."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-72",
    title="attention does its work twice from 256 keys on",
    kind="memory",
    source="omlx issue 2155",
    visible="work of a prompt past a threshold; every result is right",
    expected=Address("mla.attention", 5, "prefill"),
    case="cost",
    differs="256 keys in place of 8192, and eight heads are the layout that stays quick",
)


@day0check.operator.wrap("mla.attention", phase="prefill")
def attention(inner, q, *, visible, **kwargs):
    if int(visible.max()) >= 256 and q.shape[1] != 8:
        inner(q, visible=visible, **kwargs)
    return inner(q, visible=visible, **kwargs)
