"""One library gives log-sum-exps to base 2, and the merge takes them for natural ones."""

import math

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-105",
    title="log-sum-exps of the parts to base 2, merged as natural ones",
    kind="phases",
    visible="when there is more than one part to merge",
    expected=Address("mla.partial", 5, "prefill"),
    case="prefix_chunks",
)


@day0check.operator.wrap("mla.partial")
def partial(inner, q, **kwargs):
    y, lse = inner(q, **kwargs)
    return y, lse / math.log(2)
