"""The position table is resized with another cubic coefficient: -0.5 for -0.75."""

import torch
import torch.nn.functional as F

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-49",
    title="position table resized with cubic coefficient -0.5",
    kind="vision",
    source="mlx-vlm issue 1241",
    visible="images whose grid is not that of the table",
    expected=Address("vision.position", None, "prefill"),
    case="image",
    model="fault-vl",
)


@day0check.operator("vision.position")
def position(x, *, table, grids, mode):
    pieces = []
    for _, h, w in grids:
        # with `antialias` torch uses the coefficient -0.5; where a grid grows it changes nothing else
        resized = F.interpolate(table.float().permute(2, 0, 1)[None], (h, w), mode=mode, antialias=True)[0]
        pieces.append(resized.permute(1, 2, 0).reshape(h * w, -1))
    return (x.float() + torch.cat(pieces)).to(x.dtype)
