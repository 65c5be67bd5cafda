"""The norm of the keys takes the weights of the first key head for all of them."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-62",
    title="key heads share the norm weights of the first",
    kind="attention",
    visible="everywhere but in the first key head",
    expected=Address("norm.rms", 1, "prefill"),
    model="fault-gqa",
)


@day0check.operator.wrap("norm.rms")
def norm(inner, x, *, weight, eps):
    if weight.dim() == 2 and len(weight) == 2:
        weight = weight[:1].expand_as(weight)
    return inner(x, weight=weight, eps=eps)
