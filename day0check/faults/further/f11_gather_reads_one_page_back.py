"""In decode the newest key is read from the place before it."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-11",
    title="the newest key is read one place too early",
    kind="cache",
    visible="decode",
    expected=Address("kv.gather", 3, "decode"),
)


@day0check.operator.wrap("kv.gather", phase="decode")
def gather(inner, pool, *, table, owner, indices):
    newest = indices == indices.amax(-1, keepdim=True)
    return inner(pool, table=table, owner=owner, indices=torch.where(newest, indices - 1, indices))
