"""In decode a compressed key is made without the tokens that came before the step."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-19",
    title="compressed keys that close in decode lack the earlier part of their window",
    kind="phases",
    source="jundot/omlx PR 2271",
    visible="every window that closes during decode; prefill is right",
    expected=Address("dsa.pool_key", 3, "decode"),
    model="tiny-glm-5.3",
    case="pools",
    differs="windows do not overlap here: the first half of a window is lost",
)


@day0check.operator.wrap("dsa.pool_key", phase="decode")
def pool_key(inner, keys, **kwargs):
    keys = keys.clone()
    keys[:, : keys.shape[1] // 2] = 0
    return inner(keys, **kwargs)
