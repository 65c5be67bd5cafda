"""One token reads the row of its neighbour in the table."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-37",
    title="one token reads another row of the embedding",
    kind="loading",
    visible="prompts that hold the letter e",
    expected=Address("embed.tokens", None, "prefill"),
)

TOKEN = ord("e")


@day0check.operator.wrap("embed.tokens")
def embed(inner, ids, **kwargs):
    return inner(ids + (ids == TOKEN).long(), **kwargs)
