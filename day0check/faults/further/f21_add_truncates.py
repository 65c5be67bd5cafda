"""The residual sum is cut, not rounded."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-21",
    title="the residual add truncates",
    kind="residual",
    visible="sums that are not exact",
    expected=Address("residual.add", 0, "prefill"),
)

UPPER_HALF = -65536


@day0check.operator("residual.add")
def add(x, *, y):
    return ((x.float() + y.float()).view(torch.int32) & UPPER_HALF).view(torch.float32).to(x.dtype)
