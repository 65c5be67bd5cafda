"""The two axes of the vision tower change places in its rotary embedding."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-25",
    title="vision rotates rows by columns",
    kind="vision",
    visible="images that are not square, and inside those that are",
    expected=Address("vision.rope", None, "prefill"),
    case="image",
)


@day0check.operator.wrap("vision.rope")
def rope(inner, x, *, grids, theta):
    order = torch.cat([place + start for place, start in _transposed(grids)])
    turned = inner(x[order].contiguous(), grids=tuple((t, w, h) for t, h, w in grids), theta=theta)
    return turned[torch.argsort(order)]


def _transposed(grids):
    start = 0
    for t, h, w in grids:
        yield torch.arange(t * h * w).view(t, h, w).transpose(1, 2).flatten(), start
        start += t * h * w
