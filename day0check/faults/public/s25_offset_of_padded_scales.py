"""Scales lie in a buffer with padded rows, the offset of an expert is computed without the padding."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-25",
    title="the scales of every expert but the first are read at the offset without padding",
    kind="quantisation",
    source="vllm PR 35497",
    visible="experts from number 1 on, when their rows are no multiple of the padding",
    expected=Address("moe.convert", 1, "prefill"),
)
PADDED_TO = 96


@day0check.operator.wrap("moe.convert")
def convert(inner, packed, *, scale, **kwargs):
    experts, rows, groups = scale.shape
    buffer = torch.full((experts, PADDED_TO, groups), 127, dtype=scale.dtype, device=scale.device)
    buffer[:, :rows] = scale
    shifted = buffer.flatten(0, 1)[: experts * rows].view(experts, rows, groups)
    return inner(packed, scale=shifted, **kwargs)
