"""Redundant experts whose replicas take the rows in turn, summed over ranks: every pair is computed once."""

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-81",
    title="replicas of an expert share its rows",
    kind="ranks",
    visible="rows that choose an expert with a replica",
    expected=None,
    model="fault-ranks",
    layout={"tensor_parallel": 2, "expert_parallel": 2, "expert_dispatch": "reduce", "redundant_experts": 5},
)


@day0check.operator("comm.all_reduce")
def all_reduce(parts):
    total = parts[:, 0].double()
    for rank in range(1, parts.shape[1]):
        total = total + parts[:, rank].double()
    return total.to(parts.dtype)
