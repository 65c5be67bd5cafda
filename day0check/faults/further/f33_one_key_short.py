"""In decode the selection keeps one key less than it may."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-33",
    title="the selection is one key short in decode",
    kind="index",
    visible="decode beyond the size of the selection",
    expected=Address("dsa.select", 3, "decode"),
)


@day0check.operator.wrap("dsa.select", phase="decode")
def select(inner, scores, *, k, **kwargs):
    return torch.nn.functional.pad(inner(scores, k=k - 1, **kwargs), (0, 1), value=-1)
