"""In decode the second best token is chosen."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-19",
    title="the sampler takes the second best token",
    kind="output",
    visible="decode",
    expected=Address("sample.token", None, "decode"),
)


@day0check.operator.wrap("sample.token", phase="decode")
def sample(inner, logits, **kwargs):
    best = inner(logits, **kwargs)
    return inner(logits.scatter(1, best.unsqueeze(1), float("-inf")), **kwargs)
