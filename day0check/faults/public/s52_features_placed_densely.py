"""Features are written densely from the first placeholder on, whatever stands between."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-52",
    title="image features are spliced densely from the first placeholder",
    kind="vision",
    source="vllm issue 15144",
    visible="when other tokens lie between placeholders",
    expected=Address("splice.merge", None, "prefill"),
    case="two_images",
    differs="the text between two images stands for row breaks",
)


@day0check.operator.wrap("splice.merge")
def merge(inner, x, *, features, at):
    return inner(x, features=features, at=torch.arange(len(at), device=at.device) + at[0])
