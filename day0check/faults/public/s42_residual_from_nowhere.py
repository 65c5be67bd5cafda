"""The fused first norm adds a residual that nobody gave: an uninitialised buffer."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-42",
    title="the first norm of a step adds an uninitialised residual",
    kind="residual",
    source="vllm PR 41972",
    visible="the first norm, by what the allocator hands out",
    expected=Address("norm.rms", 0, "prefill"),
    differs="the buffer holds 0.25, so that every run is alike",
)

_first = []  # not empty from the begin of a step until its first norm


@day0check.operator.wrap("embed.tokens")
def embed(inner, ids, **kwargs):
    _first[:] = [True]
    return inner(ids, **kwargs)


@day0check.operator.wrap("norm.rms")
def norm(inner, x, **kwargs):
    stale = torch.full_like(x, 0.25) if _first else torch.zeros_like(x)  # what the last owner of the memory left there
    _first.clear()
    return inner(x + stale, **kwargs)
