"""The host buffer of a step is rewritten while its copy is under way: a step reads the ids of another."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-75",
    title="a decode step reads the token of another step",
    kind="memory",
    source="vllm PR 47644, PR 25279, PR 54269",
    visible="decode under load",
    expected=Address("embed.tokens", None, "decode"),
    differs="the step before in place of the one after, and always",
)

_before = []


@day0check.operator.wrap("embed.tokens")
def embed(inner, ids, **kwargs):
    stale = _before[-1][-len(ids) :] if _before and len(ids) <= len(_before[-1]) else ids
    _before.append(ids)
    return inner(stale if len(ids) == 1 else ids, **kwargs)
