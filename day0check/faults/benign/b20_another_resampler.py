"""The same bicubic rule by another library: weights of its own, levels rounded once and not after each axis."""

import day0check
from day0check.faults.entry import Entry
from day0check.faults.resampler import PROFILE, resized

ENTRY = Entry(
    id="B-20",
    title="images resized by another library's bicubic rule, under a profile that claims the rule",
    kind="vision",
    visible="one level in some pixels",
    expected=None,
    case="image",
    profile=PROFILE,
)


@day0check.operator.wrap("image.preprocess")
def preprocess(inner, image, *, mean, std, **limits):
    return inner(resized(image, "bicubic", limits), mean=mean, std=std, **limits)
