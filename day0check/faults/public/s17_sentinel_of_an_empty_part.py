"""Another library marks a part without keys with +inf; the merge knows -inf only."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-17",
    title="the merge meets the +inf of a part without keys",
    kind="phases",
    source="vllm PR 15492",
    visible="a batch of fresh and continued requests: rows without a cached part",
    expected=Address("mla.merge", 5, "prefill"),
    case="prefix_chunks",
)


@day0check.operator.wrap("mla.merge")
def merge(inner, parts, *, lse):
    return inner(parts, lse=torch.where(lse == float("-inf"), float("inf"), lse))
