"""Index scores sum the heads without the ReLU."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-02",
    title="index scores without the ReLU on each head",
    kind="index",
    source="mlx-lm PR 531",
    visible="wherever some head's product is negative",
    expected=Address("dsa.score", 3, "prefill"),
)


@day0check.operator("dsa.score")
def score(q, *, weights, keys, owner, scale):
    dots = torch.einsum("rhd,rnd->rhn", q.float(), keys[owner.clamp(min=0)].float()) * scale
    return torch.einsum("rh,rhn->rn", weights, dots)
