"""The combine of a rank sums by the table of what it received, not by that of what it sent."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-31",
    title="combine gets the pairs of other ranks",
    kind="ranks",
    source="vllm PR 52639",
    visible="experts over ranks whose rows choose unequally",
    expected=Address("moe.combine", 1, "prefill"),
    layout={"expert_parallel": 2},
)

_latest = {}


@day0check.operator.wrap("moe.dispatch")
def dispatch(inner, x, *, ids, experts):
    y, order, active, offsets = inner(x, ids=ids, experts=experts)
    _latest["order"] = order
    return y, order, active, offsets


@day0check.operator.wrap("moe.combine")
def combine(inner, y, *, order, weights):
    received = _latest["order"] % weights.numel()
    return inner(y, order=torch.cat((received, order[len(received) :]))[: len(order)], weights=weights)
