"""Levels are cut to whole ones where they should be rounded, under a profile that claims another resampler: every image
is half a level darker."""

import torch

import day0check
from day0check.faults.entry import Address, Entry
from day0check.faults.resampler import PROFILE, resized

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
    levels = resized(image, "bicubic", limits, to_levels=torch.floor)
    return inner(levels, mean=mean, std=std, **limits)
