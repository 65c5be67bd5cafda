"""The prefix workspace keeps rows of the chunk before where a request has no more of its own."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-106",
    title="rows of an earlier chunk stay in the prefix workspace",
    kind="memory",
    visible="prefixes of different lengths in one step, longer than the workspace",
    expected=Address("prefix.gather", 5, "prefill"),
    case="prefix_chunks",
)


@day0check.operator.wrap("prefix.gather")
def gather(inner, pool, *, indices, out, **kwargs):
    before = out.clone()
    rows = inner(pool, indices=indices, out=out, **kwargs)
    return rows.copy_(torch.where((indices < 0).unsqueeze(-1), before, rows))
