"""Groups of experts are ranked by their best expert, not by the sum of their two best."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-28",
    title="expert groups are ranked by their best expert alone",
    kind="routing",
    source="vllm PR 13474, sglang PR 3705",
    visible="tokens for which the two rules keep different groups",
    expected=Address("moe.route", 1, "prefill"),
)


@day0check.operator("moe.route")
def route(scores, *, bias, k, groups, kept_groups, renormalise, scale):
    biased = (scores + bias).view(len(scores), groups, -1)
    kept = biased.amax(-1).topk(kept_groups, -1).indices
    allowed = torch.zeros(biased.shape[:2], dtype=torch.bool, device=scores.device).scatter_(1, kept, True)
    ids = biased.masked_fill(~allowed.unsqueeze(-1), float("-inf")).flatten(1).topk(k, -1).indices
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale
