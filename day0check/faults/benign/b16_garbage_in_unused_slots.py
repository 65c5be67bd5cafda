"""Memory that nobody wrote holds large numbers."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-16",
    title="unused slots hold large numbers",
    kind="cache",
    visible="nowhere",
    expected=None,
    case="pages",
)


@day0check.layout("kv")
@day0check.layout("index")
class Garbage:
    def allocate(self, pages, page, width, dtype, device):
        return torch.full((pages * page, width), 3e4, dtype=dtype, device=device)

    def write(self, memory, rows, slots):
        memory[slots] = rows

    def read_logical(self, memory, slots):
        return memory[slots]
