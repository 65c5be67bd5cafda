"""The head is taken for one of its own where it should share the embedding: it stays random."""

from day0check.faults.damage import Damaged, named, noise
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-60",
    title="the output matrix is random",
    kind="loading",
    source="transformers PR 43429",
    visible="logits alone; every hidden state is exact",
    expected=Address("head.logits", None, "prefill"),
)


class Candidate(Damaged):
    def tensors(self, tensors):
        name = named(tensors, "lm_head.weight")
        tensors[name] = noise(tensors[name], seed=1)
