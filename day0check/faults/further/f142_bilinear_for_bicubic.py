"""Images are resized by the bilinear rule where the bicubic one is due, under a profile that claims its rule alone."""

import day0check
from day0check.faults.entry import Address, Entry
from day0check.faults.resampler import PROFILE, resized

ENTRY = Entry(
    id="F-142",
    title="a bilinear resampler where any bicubic one is legal",
    kind="vision",
    visible="edges in images",
    expected=Address("image.preprocess", None, "prefill"),
    case="image",
    profile=PROFILE,
)


@day0check.operator.wrap("image.preprocess")
def preprocess(inner, image, *, mean, std, **limits):
    return inner(resized(image, "bilinear", limits), mean=mean, std=std, **limits)
