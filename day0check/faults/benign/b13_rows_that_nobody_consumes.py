"""Attention leaves what it finds in rows of padding, which see no key and which nobody consumes."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-13",
    title="rows of padding hold what their kernel leaves there",
    kind="phases",
    visible="nowhere: rows without a request",
    expected=None,
    case="padded",
)

LEFT_THERE = -3.0e4


@day0check.operator.wrap("mla.attention")
def dense(inner, q, *, owner, **kwargs):
    y = inner(q, owner=owner, **kwargs)
    return torch.where((owner < 0)[:, None, None], LEFT_THERE, y).to(y.dtype)


@day0check.operator.wrap("dsa.attention")
def sparse(inner, q, *, valid, **kwargs):
    y = inner(q, valid=valid, **kwargs)
    return torch.where(valid.any(-1)[:, None, None], y, LEFT_THERE).to(y.dtype)
