"""Features are written densely from the first placeholder on, over the tokens that end the rows of the image."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-52",
    title="image features are spliced densely over row breaks",
    kind="vision",
    source="vllm issue 15144",
    visible="images whose rows end with a token that has no feature",
    expected=Address("splice.merge", None, "prefill"),
    model="fault-vl",
    case="image",
)


@day0check.operator.wrap("splice.merge")
def merge(inner, x, *, features, at):
    return inner(x, features=features, at=torch.arange(len(at), device=at.device) + at[0])
