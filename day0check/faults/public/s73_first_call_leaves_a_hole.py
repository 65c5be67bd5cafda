"""The first launch after a start leaves one element of a fresh buffer unwritten."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-73",
    title="one element of the first call is left unwritten",
    kind="memory",
    source="vllm-ascend PR 17003",
    visible="the first request after a start alone",
    expected=Address("kda.attention", 0, "prefill", position=0),
)

_called = []


@day0check.operator.wrap("kda.attention", phase="prefill")
def attention(inner, q, **kwargs):
    y, state = inner(q, **kwargs)
    if not _called:
        y[0, 0, 0] = float("nan")
    _called.append(True)
    return y, state
