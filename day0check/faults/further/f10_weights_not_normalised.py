"""The sum of the combine weights is 0.4% too small."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-10",
    title="combine weights are normalised to 1.004",
    kind="routing",
    visible="every token",
    expected=Address("moe.route", 1, "prefill"),
)


@day0check.operator.wrap("moe.route")
def route(inner, scores, **kwargs):
    ids, weights = inner(scores, **kwargs)
    return ids, weights * 1.004
