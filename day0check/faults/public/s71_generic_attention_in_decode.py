"""A gate on the head size sends full attention to a generic kernel: its decode time grows with the context."""

import time

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-71",
    title="full attention takes a slow kernel in decode",
    kind="memory",
    source="vllm issue 50264",
    visible="time of a decode step over the context; every result is right",
    expected=Address("mla.attention", 5, "decode"),
    case="cost",
    differs="a wait of 10 us a key in place of a slow kernel",
)


@day0check.operator.wrap("mla.attention", phase="decode")
def attention(inner, q, *, visible, **kwargs):
    time.sleep(1e-5 * int(visible.max()))
    return inner(q, visible=visible, **kwargs)
