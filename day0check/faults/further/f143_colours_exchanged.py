"""A decoder gives blue first, and nobody turns it, under a profile that claims another resampler."""

import day0check
from day0check.faults.entry import Address, Entry
from day0check.faults.resampler import PROFILE, resized

ENTRY = Entry(
    id="F-143",
    title="red and blue exchanged, where any bicubic resampler is legal",
    kind="vision",
    visible="every image in colours",
    expected=Address("image.preprocess", None, "prefill"),
    case="image",
    profile=PROFILE,
)


@day0check.operator.wrap("image.preprocess")
def preprocess(inner, image, *, mean, std, **limits):
    return inner(resized(image, "bicubic", limits).flip(-1), mean=mean, std=std, **limits)
