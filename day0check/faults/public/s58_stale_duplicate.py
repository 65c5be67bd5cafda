"""A stale copy of an expert in another file overwrites the one that the index names."""

from day0check.faults.damage import Damaged, named
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-58",
    title="a stale duplicate of one expert matrix is loaded",
    kind="loading",
    source="vllm PR 54230",
    visible="tokens that are routed to that expert",
    expected=Address("moe.convert", 1, "prefill"),
)


class Candidate(Damaged):
    def tensors(self, tensors):
        name = named(tensors, "layers.1.block_sparse_moe.experts.2.w3.weight_packed")
        tensors[name] = tensors[name].roll(1, 0)  # an older version of it
