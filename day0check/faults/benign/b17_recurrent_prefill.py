"""Linear attention runs token by token in prefill as well."""

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-17",
    title="recurrent in place of chunked",
    kind="linear-attention",
    visible="last bits",
    expected=None,
)


@day0check.operator.wrap("kda.attention", phase="prefill")
def attention(inner, q, *, chunk, **kwargs):
    return inner(q, chunk=None, **kwargs)
