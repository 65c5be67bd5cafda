"""Layers that share the selection of the layer before them choose their own keys."""

from day0check.faults.damage import Damaged, text_config
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-07",
    title="layers that share an index choose their own keys",
    kind="index",
    source="ik_llama.cpp PR 2063, ROCm ATOM PR 1260, mlx-lm issue 1410",
    visible="shared layers, once the context is longer than the selection",
    expected=Address("dsa.select", 2, "prefill"),
    model="tiny-glm-5",
)


class Candidate(Damaged):
    """Every layer has an index; the shared ones that of the layer before, on their own input."""

    def config(self, config):
        text = text_config(config)
        text["indexer_types"] = ["full"] * len(text["indexer_types"])

    def tensors(self, tensors):
        for name in [n for n in tensors if ".indexer." in n]:
            head, layer, tail = _split(name)
            own = f"{head}{layer + 1}.{tail}"
            if own not in tensors:
                tensors[own] = tensors[name].clone()


def _split(name):
    head, _, rest = name.partition("layers.")
    number, _, tail = rest.partition(".")
    return f"{head}layers.", int(number), tail
