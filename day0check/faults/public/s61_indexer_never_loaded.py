"""Layers without an indexer in the checkpoint get one, with the values it was made with."""

from day0check.faults.damage import Damaged, noise, text_config
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-61",
    title="shared layers have an indexer that was never loaded",
    kind="loading",
    source="ROCm ATOM PR 1260",
    visible="shared layers, once the context is longer than the selection",
    expected=Address("dsa.index_query", 2, "prefill"),
    model="tiny-glm-5",
)


class Candidate(Damaged):
    def config(self, config):
        text = text_config(config)
        text["indexer_types"] = ["full"] * len(text["indexer_types"])

    def tensors(self, tensors):
        for seed, name in enumerate(sorted(n for n in tensors if ".indexer." in n)):
            head, _, rest = name.partition("layers.")
            layer, _, tail = rest.partition(".")
            own = f"{head}layers.{int(layer) + 1}.{tail}"
            if own not in tensors:
                tensors[own] = noise(tensors[name], seed)
