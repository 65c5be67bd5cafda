"""One scale byte of one expert is one too large."""

from day0check.faults.damage import Damaged, named
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-08",
    title="one block of one expert is twice as large",
    kind="quantisation",
    visible="tokens that are routed to that expert",
    expected=Address("moe.convert", 4, "prefill"),
)


class Candidate(Damaged):
    def tensors(self, tensors):
        name = named(tensors, "layers.4.block_sparse_moe.experts.13.w2.weight_scale")
        tensors[name] = tensors[name].clone()
        tensors[name][3, 1] += 1
