"""The mask that keeps images apart is not handed on."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-50",
    title="images of one turn attend to each other",
    kind="vision",
    source="sglang-jax PR 1289",
    visible="two or more images in one call",
    expected=Address("vision.attention", None, "prefill"),
    case="two_images",
)


@day0check.operator.wrap("vision.attention")
def attention(inner, q, *, offsets, **kwargs):
    return inner(q, offsets=offsets[[0, -1]], **kwargs)
