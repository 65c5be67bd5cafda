"""The sum of squares of a norm is accumulated in bfloat16."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-41",
    title="the variance of the norm is summed in bfloat16",
    kind="residual",
    source="sglang PR 27540",
    visible="every row a little, rows with outlier channels a lot",
    expected=Address("norm.rms", 0, "prefill"),
)


@day0check.operator("norm.rms")
def norm(x, *, weight=None, eps):
    squares, width = x.square(), x.shape[-1]
    while squares.shape[-1] > 1:
        if squares.shape[-1] % 2:
            squares = torch.nn.functional.pad(squares, (0, 1))
        half = squares.shape[-1] // 2
        squares = squares[..., :half] + squares[..., half:]
    y = x.float() * torch.rsqrt(squares.float() / width + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)
