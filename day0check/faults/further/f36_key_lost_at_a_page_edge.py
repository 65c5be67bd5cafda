"""Attention loses the last key of the first page."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-36",
    title="the last key of a page is lost",
    kind="attention",
    visible="rows beyond the first page",
    expected=Address("mla.attention", 5, "prefill"),
)

EDGE = 63


@day0check.operator.wrap("mla.attention", phase="prefill")
def attention(inner, q, *, keys, values, visible, **kwargs):
    y = inner(q, keys=keys, values=values, visible=visible, **kwargs)
    kept = torch.tensor([k for k in range(keys.shape[1]) if k != EDGE], device=keys.device)
    beyond = visible > EDGE
    short = visible - beyond.long()
    without = inner(q, keys=keys[:, kept], values=values[:, kept], visible=short, **kwargs)
    return torch.where(beyond[:, None, None], without, y)
