"""Scales of FP8 activations are rounded up to powers of two for the kernel; the codes stay those of the old scales."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-81",
    title="scales of FP8 rows rounded up, codes kept",
    kind="quantisation",
    visible="every block whose scale is no power of two",
    expected=Address("quantise.rows", 0, "prefill"),
    profile="fp8-activations",
)


@day0check.operator.wrap("quantise.rows")
def rows(inner, x):
    codes, scale = inner(x)
    return codes, torch.exp2(torch.ceil(torch.log2(scale)))
