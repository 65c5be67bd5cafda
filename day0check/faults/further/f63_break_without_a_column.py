"""The break that ends a row of an image has no column of its own, so the text behind a wide image begins too early."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-63",
    title="row breaks take no column",
    kind="vision",
    visible="images that are wider than high, and what follows them",
    expected=Address("rope.positions", None, "prefill"),
    model="fault-vl",
    case="image",
)


@day0check.operator.wrap("rope.positions")
def positions(inner, ids, *, media_pad, row_break):
    found = inner(ids, media_pad=media_pad, row_break=row_break).clone()
    breaks = ids == row_break
    found[breaks, 2] -= 1
    image = breaks | (ids == media_pad)
    ends = image & ~torch.cat((image[1:], image.new_zeros(1)))
    found[~image] -= ends.cumsum(0)[~image].unsqueeze(1)
    return found
