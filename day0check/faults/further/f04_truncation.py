"""Results are cut to bfloat16, not rounded."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-04",
    title="truncation in place of rounding",
    kind="experts",
    visible="every element that is not exact",
    expected=Address("moe.up", 1, "prefill"),
)

UPPER_HALF = -65536


@day0check.operator("moe.up")
def up(x, *, weight):
    exact = x.float() @ weight.float().T
    return (exact.view(torch.int32) & UPPER_HALF).view(torch.float32).to(x.dtype)
