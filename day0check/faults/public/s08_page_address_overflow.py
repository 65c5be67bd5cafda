"""The address of a page is computed in too few bits."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-08",
    title="the address of an index-key page wraps around",
    kind="cache",
    source="ROCm aiter PR 4427",
    visible="requests whose pages have high numbers",
    expected=Address("index.gather", 3, "prefill"),
    case="pages",
    differs="wraps at 2^11 elements in place of 2^32",
)
WRAPS_AT = 2**11


@day0check.operator("index.gather")
def gather(pool, *, table, owner, indices):
    page, width = pool.shape[1:]
    wanted, absent = indices.long().clamp(min=0), (indices < 0).unsqueeze(-1)
    block = table[owner.unsqueeze(1), wanted // page].clamp(min=0)
    element = (block * page * width) % WRAPS_AT + wanted % page * width
    at = element.unsqueeze(-1) + torch.arange(width, device=pool.device)
    return pool.flatten()[at].masked_fill(absent, 0)
