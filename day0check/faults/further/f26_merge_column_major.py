"""Groups of patches are merged column by column."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-26",
    title="patches are merged column by column",
    kind="vision",
    visible="every image of more than one row",
    expected=Address("vision.merge", None, "prefill"),
    case="image",
)


@day0check.operator("vision.merge")
def merge(x, *, grids, merge):
    pieces, start = [], 0
    for t, h, w in grids:
        frame = x[start : start + t * h * w].view(h // merge, merge, w // merge, merge, -1)
        pieces.append(frame.permute(2, 0, 1, 3, 4).reshape(h * w // merge**2, -1))
        start += t * h * w
    return torch.cat(pieces)
