"""The selection may see the key after the row's own."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-78",
    title="the causal limit of the index is off by one",
    kind="index",
    source="transformers issues 45820 and 45758",
    visible="prefill; one-token decode cannot see the future",
    expected=Address("dsa.select", 3, "prefill"),
    differs="single keys in place of compressed windows",
)


@day0check.operator.wrap("dsa.select", phase="prefill")
def select(inner, scores, *, visible, **kwargs):
    return inner(scores, visible=(visible + 1).clamp(max=scores.shape[1]), **kwargs)
