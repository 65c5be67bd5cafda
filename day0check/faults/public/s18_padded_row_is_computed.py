"""Padding rows of a captured decode step keep counters of a request that is gone, and are taken for its next token."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-18",
    title="a padding row counts as one more token of the last request",
    kind="phases",
    source="vllm issue 41841",
    visible="decode steps with padding rows, and states that remember",
    expected=Address("kda.conv", 0, "decode"),
    case="padded",
    differs="the row goes on with the last request of the step in place of one that is gone",
)


def _counted(offsets, rows):
    counted = offsets.clone()
    counted[-1] = min(rows, int(offsets[-1]) + 1)
    return counted


@day0check.operator.wrap("kda.conv", phase="decode")
def conv(inner, x, *, offsets, **kwargs):
    return inner(x, offsets=_counted(offsets, x.shape[0]), **kwargs)


@day0check.operator.wrap("kda.attention", phase="decode")
def attention(inner, q, *, offsets, **kwargs):
    return inner(q, offsets=_counted(offsets, q.shape[0]), **kwargs)
