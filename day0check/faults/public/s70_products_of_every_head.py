"""The fallback of the indexer forms the products of all rows, keys and heads before it sums over the heads."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-70",
    title="index scores of every head exist at once",
    kind="memory",
    source="sglang issue 33246",
    visible="memory over the context; every result is right",
    expected=Address("dsa.score", 3, "prefill"),
    case="cost",
    differs="16 heads in place of 64",
)


@day0check.operator("dsa.score")
def score(q, *, weights, keys, owner, scale):
    of_row = keys[owner.clamp(min=0)] if keys.shape[0] > 1 else keys.expand(q.shape[0], -1, -1)
    products = torch.einsum("rhd,rnd->rhn", q.float(), of_row.float()).relu()
    scores = torch.einsum("rhn,rh->rn", products, weights.float() * scale)
    return scores.masked_fill((owner < 0).unsqueeze(1), 0.0)
