"""The indexer rotates neighbouring channels where its pairs are (i, i + d/2)."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-01",
    title="the indexer's rotary embedding pairs neighbouring channels",
    kind="index",
    source="vllm PR 28968, sglang PR 13495, vllm-ascend PR 4641",
    visible="any position but 0; the choice of keys changes once the context is longer than the selection",
    expected=Address("rope.apply", 3, "prefill"),
    differs="both sides, queries and keys",
)


@day0check.operator.wrap("rope.apply")
def rope(inner, x, *, layout, **kwargs):
    return inner(x, layout="interleaved" if layout == "half" else layout, **kwargs)
