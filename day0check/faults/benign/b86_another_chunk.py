"""Delta attention in chunks half as long as the contract's."""

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-86",
    title="chunks of half the length",
    kind="linear-attention",
    visible="last bits",
    expected=None,
)


@day0check.operator.wrap("kda.attention", phase="prefill")
def attention(inner, q, *, chunk, **kwargs):
    return inner(q, chunk=chunk // 2, **kwargs)
