"""Levels are cut to whole ones where they should be rounded, under a profile that claims another resampler: every image
is half a level darker."""

import torch

import day0check
from day0check.faults.entry import Address, Entry
from day0check.faults.resampler import PROFILE
from reference.image_grid import grid_within
from reference.resample import resized

ENTRY = Entry(
    id="F-144",
    title="levels cut off where any bicubic resampler that rounds is legal",
    kind="vision",
    visible="half a level in every pixel",
    expected=Address("image.preprocess", None, "prefill"),
    case="image",
    profile=PROFILE,
)


@day0check.operator.wrap("image.preprocess")
def preprocess(inner, image, *, mean, std, **limits):
    grid = grid_within(image.shape[1], image.shape[0], **limits)
    levels = resized(image, height=grid.height, width=grid.width).floor().to(torch.uint8)
    return inner(levels, mean=mean, std=std, **limits)
