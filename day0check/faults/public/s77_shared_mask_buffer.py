"""The mask of image tokens of one step is still in use when the next step writes it."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-77",
    title="a step splices its image by the mask of another step",
    kind="memory",
    source="vllm PR 31841",
    visible="two steps with images in flight",
    expected=Address("splice.positions", None, "prefill", request="b"),
    case="two_requests",
    differs="the mask of the step before",
)

_before = []


@day0check.operator.wrap("splice.positions")
def positions(inner, ids, **kwargs):
    at, feature = inner(ids, **kwargs)
    used = next((old for old in _before[-1:] if len(old) == len(at) and int(old.max()) < len(ids)), at)
    _before.append(at)
    return used, feature
