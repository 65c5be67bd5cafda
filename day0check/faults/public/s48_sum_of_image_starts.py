"""The places where images begin are added up to one number: right for one image, nowhere with two."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-48",
    title="positions of images from the sum of their starts",
    kind="vision",
    source="mlx-vlm PR 1282",
    visible="two images or more; one is right",
    expected=Address("rope.positions", None, "prefill"),
    model="fault-vl",
    case="two_images",
)


@day0check.operator.wrap("rope.positions")
def positions(inner, ids, *, media_pad, row_break):
    image = (ids == media_pad) | (ids == row_break)
    begins = image.nonzero().flatten()
    begins = begins[~image[(begins - 1).clamp(min=0)]]
    used = torch.where(image, 0, ids)  # without its images a sequence is text throughout
    first = int(begins.sum())
    length = int((~image[first:]).long().argmax()) if first < len(ids) else 0
    used[first : first + length] = ids[first : first + length]
    return inner(used, media_pad=media_pad, row_break=row_break)
