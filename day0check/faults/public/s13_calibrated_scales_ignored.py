"""The loader has no mapping for the calibrated scales of an FP8 cache: they stay at one."""

import torch

from day0check.faults.damage import Damaged
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-13",
    title="k_scale of the checkpoint is ignored, the cache is quantised at scale one",
    kind="cache",
    source="vllm issue 54623",
    visible="coarser or saturated cache rows in every layer",
    expected=Address("kv.quantise", 0, "prefill"),
    model="fault-cache",
    profile="fp8-cache",
    differs="a latent row has one scale for keys and values alike",
)


class Candidate(Damaged):
    def tensors(self, tensors):
        for name in tensors:
            if name.endswith(".k_scale"):
                tensors[name] = torch.ones(1)
