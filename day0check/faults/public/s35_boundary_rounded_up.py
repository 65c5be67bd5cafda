"""A chunk that ends inside a block is entered as if it had reached the end of the block."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-35",
    title="the state after eleven tokens is entered as that of the block of sixteen",
    kind="linear-attention",
    source="vllm PR 51113",
    visible="chunks that end off the edges of blocks",
    expected=Address("prefix.register", None, "prefill"),
    case="prefix",
    differs="the block is entered with the rows of a later chunk, before they are computed",
)


@day0check.operator.wrap("prefix.register")
def register(inner, held, *, tokens, at, **keywords):
    page = (held.shape[1] - 5) // 3
    known = at[0] + len(tokens) // page * page  # only of whole blocks of known tokens is there a hash to enter them by
    rounded = torch.minimum(-(-at[1] // page) * page, known)
    return inner(held, tokens=tokens, at=torch.stack((at[0], torch.maximum(at[1], rounded))), **keywords)
