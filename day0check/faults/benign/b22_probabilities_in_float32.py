"""Probabilities stay in float32 until the result."""

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-22",
    title="probabilities in float32",
    kind="attention",
    visible="last bits",
    expected=None,
)


@day0check.operator.wrap("dsa.attention")
def attention(inner, q, *, keys, **kwargs):
    return inner(q.float(), keys=keys.float(), **kwargs).to(q.dtype)


@day0check.operator.wrap("mla.attention")
def dense(inner, q, *, keys, values, **kwargs):
    return inner(q.float(), keys=keys.float(), values=values.float(), **kwargs).to(q.dtype)
