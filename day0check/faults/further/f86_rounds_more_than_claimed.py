"""A norm that is cast before its weight, under a profile that claims one rounding."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-86",
    title="norm cast before its weight under bf16",
    kind="residual",
    visible="last bits of every norm",
    expected=Address("norm.rms", 0, "prefill"),
)


@day0check.operator("norm.rms")
def rms_norm(x, *, weight=None, eps):
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if weight is None else normed * weight.to(x.dtype)
