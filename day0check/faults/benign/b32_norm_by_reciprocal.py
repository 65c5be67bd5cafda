"""Norms divide by the root where others multiply by its reciprocal."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-32",
    title="division in place of a reciprocal root",
    kind="residual",
    visible="last bits",
    expected=None,
)


@day0check.operator("norm.rms")
def norm(x, *, weight=None, eps):
    y = x.float() / torch.sqrt(x.float().square().sum(-1, keepdim=True) / x.shape[-1] + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype)
