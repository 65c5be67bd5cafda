"""The indexer keeps scratch for all rows of a chunk and all positions, in every layer, outside all budgets."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-69",
    title="score scratch over the whole context is kept for every layer",
    kind="memory",
    source="sglang issue 35201, fix 39095",
    visible="memory over the context; every result is right",
    expected=Address("dsa.score", 3, "prefill"),
    case="cost",
)

_scratch = []


@day0check.operator.wrap("dsa.score", phase="prefill")
def score(inner, q, *, keys, **kwargs):
    _scratch.append(torch.zeros(q.shape[0], keys.shape[1], device=q.device))
    return inner(q, keys=keys, **kwargs)
