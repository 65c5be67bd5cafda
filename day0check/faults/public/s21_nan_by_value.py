"""The reserved scale code is looked for in the decoded value."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-21",
    title="the NaN test of E8M0 looks at the decoded value: code 134 becomes NaN",
    kind="quantisation",
    source="sglang PR 25519",
    visible="blocks with a scale of 2^7",
    expected=Address("moe.convert", None, "prefill"),
    case="operators/contracts",
)
WRONG_CODE = 134  # decodes to 128, which was taken for the sentinel


@day0check.operator.wrap("moe.convert")
def convert(inner, packed, *, scale, experts, **kwargs):
    payload, block_scale, inexact = inner(packed, scale=scale, experts=experts, **kwargs)
    groups = (scale.index_select(0, experts) == WRONG_CODE).float()
    padded = groups.new_zeros(*groups.shape[:2], block_scale.shape[2] * 4)
    padded[..., : groups.shape[2]] = groups
    block_scale[padded.unflatten(-1, (-1, 4)).amax(-1) > 0] = float("nan")
    return payload, block_scale, inexact
