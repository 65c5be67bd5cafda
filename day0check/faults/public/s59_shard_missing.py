"""A shard that the index names is absent; its tensors keep what was in the memory."""

from day0check.faults.damage import Damaged, noise
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-59",
    title="the weights of an absent shard stay uninitialised",
    kind="loading",
    source="sglang PR 32279",
    visible="everything behind them",
    expected=Address("residual.mix", 5, "prefill"),
)


class Candidate(Damaged):
    """Layer 5 was in the shard."""

    def tensors(self, tensors):
        for seed, name in enumerate(sorted(n for n in tensors if ".layers.5." in n)):
            if tensors[name].is_floating_point():
                tensors[name] = noise(tensors[name], seed)
