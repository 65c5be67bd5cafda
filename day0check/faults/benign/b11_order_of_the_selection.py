"""The selected keys come in ascending order of position."""

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-11",
    title="selected keys in another order",
    kind="index",
    visible="the order of the list alone",
    expected=None,
)


@day0check.operator.wrap("dsa.select")
def select(inner, scores, **kwargs):
    return inner(scores, **kwargs).sort(-1).values
