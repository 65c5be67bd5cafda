"""A part without keys is merged as if its log-sum-exp were 0."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-15",
    title="a part without keys is merged with the weight of a real one",
    kind="phases",
    source="flashinfer issue 3047, sglang PR 22688",
    visible="rows whose part of the keys is exhausted before that of their neighbours",
    expected=Address("mla.merge", 5, "prefill"),
    case="prefix_chunks",
)


@day0check.operator.wrap("mla.merge")
def merge(inner, parts, *, lse):
    return inner(parts, lse=torch.where(lse == float("-inf"), 0.0, lse))
