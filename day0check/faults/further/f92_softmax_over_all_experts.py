"""gpt-oss: weights are the softmax over all experts, and not over those that were chosen."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-92",
    title="router weights from the softmax over all experts",
    kind="routing",
    visible="routers that weigh by softmax",
    expected=Address("moe.route", None, "prefill"),
    case="operators/contracts",
)


@day0check.operator.wrap("moe.route")
def route(inner, scores, **kwargs):
    ids, weights = inner(scores, **kwargs)
    if kwargs.get("weighting") == "softmax":
        weights = torch.softmax(scores, -1).gather(1, ids)
    return ids, weights
