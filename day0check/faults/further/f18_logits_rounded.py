"""Logits are rounded to bfloat16 before they are compared with each other."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-18",
    title="logits in bfloat16",
    kind="output",
    visible="every logit",
    expected=Address("head.logits", None, "prefill"),
)


@day0check.operator.wrap("head.logits")
def logits(inner, x, **kwargs):
    return inner(x, **kwargs).to(x.dtype).float()
