"""Rows are appended with the strides of a contiguous cache; this one is a view of two interleaved halves."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-10",
    title="a cache write takes the page stride from the shape, the cache is a view",
    kind="cache",
    source="flashinfer PR 527",
    visible="every page but number 0",
    expected=Address("kv.write", 3, "prefill"),
    case="pages",
)


@day0check.layout("kv")
class Interleaved:
    """[pages, 2, page, width]; ours is the first of the two."""

    def allocate(self, pages, page, width, dtype, device):
        return torch.full((pages, 2, page, width), float("nan"), dtype=dtype, device=device)

    def write(self, memory, rows, slots):
        memory.flatten(0, 2)[slots] = rows

    def read_logical(self, memory, slots):
        page = memory.shape[2]
        return memory[slots // page, 0, slots % page]
