"""The merge reads later parts with the padded head stride of the first."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-16",
    title="the merge reads the later parts with the strides of the first",
    kind="phases",
    source="local-inference-lab/vllm PR 17",
    visible="when there is more than one part to merge",
    expected=Address("mla.merge", 5, "prefill"),
    case="prefix_chunks",
)
PADDING = 8


@day0check.operator.wrap("mla.merge")
def merge(inner, parts, *, lse):
    rows, count, heads, width = parts.shape
    flat = torch.cat((parts.flatten(2), parts.new_zeros(rows, count, heads * PADDING)), -1)
    padded = torch.stack([flat[..., h * (width + PADDING) : h * (width + PADDING) + width] for h in range(heads)], 2)
    return inner(torch.cat((parts[:, :1], padded[:, 1:]), 1), lse=lse)
