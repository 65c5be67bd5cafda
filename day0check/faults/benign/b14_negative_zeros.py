"""Zeros of index scores and of experts are negative zeros."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-14",
    title="-0.0 in place of 0.0",
    kind="index",
    visible="the sign of zeros",
    expected=None,
)


@day0check.operator.wrap("dsa.score")
@day0check.operator.wrap("moe.experts")
@day0check.operator.wrap("mla.attention")
@day0check.operator.wrap("norm.rms")
def negative_zeros(inner, x, **kwargs):
    y = inner(x, **kwargs)
    return torch.where(y == 0, -0.0, y).to(y.dtype)
