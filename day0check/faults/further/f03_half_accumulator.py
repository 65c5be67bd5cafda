"""The sum of a linear layer runs through float16 after every 16 products."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-03",
    title="a linear layer accumulates in float16",
    kind="experts",
    visible="every row",
    expected=Address("moe.down", 1, "prefill"),
)

PIECE = 16


@day0check.operator("moe.down")
def down(x, *, weight):
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float16, device=x.device)
    for start in range(0, x.shape[1], PIECE):
        part = x[:, start : start + PIECE].float() @ weight[:, start : start + PIECE].float().T
        total = (total.float() + part).to(torch.float16)
    return total.to(x.dtype)
