"""The router's bias, meant for the choice alone, ends up in the weights as well."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-27",
    title="the selection bias is part of the combine weights",
    kind="routing",
    source="transformers PR 39581",
    visible="every token",
    expected=Address("moe.route", 1, "prefill"),
)


@day0check.operator.wrap("moe.route")
def route(inner, scores, *, bias, renormalise, scale, **kwargs):
    ids, _ = inner(scores, bias=bias, renormalise=renormalise, scale=scale, **kwargs)
    weights = (scores + bias).gather(-1, ids.clamp(min=0))
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale
