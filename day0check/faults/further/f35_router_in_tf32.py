"""Router scores keep ten bits of their mantissa."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-35",
    title="router scores with ten bits",
    kind="routing",
    visible="every score",
    expected=Address("moe.scores", 1, "prefill"),
)

TEN_BITS = -8192


@day0check.operator.wrap("moe.scores")
def scores(inner, x, **kwargs):
    return (inner(x, **kwargs).view(torch.int32) & TEN_BITS).view(torch.float32)
