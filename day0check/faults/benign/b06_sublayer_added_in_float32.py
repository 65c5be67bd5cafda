"""What a sublayer gives is added to the residual stream before it is rounded: one rounding instead of two."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-06",
    title="output projection and residual addition in one kernel, float32 between them",
    kind="residual",
    visible="last bits of the residual stream",
    expected=None,
)


@day0check.operator("mla.output")
def output(x, *, weight, gate=None):
    if gate is not None:
        x = (x.float() * torch.sigmoid(gate.float())).to(x.dtype)
    return x.float() @ weight.float().T


@day0check.operator("residual.add")
def add(x, y):
    return (x.float() + y.float()).to(torch.bfloat16)
