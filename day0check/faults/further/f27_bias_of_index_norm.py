"""The LayerNorm of the index key lacks its bias."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-27",
    title="the index key lacks the bias of its norm",
    kind="index",
    visible="every key",
    expected=Address("dsa.index_key", 3, "prefill"),
)


@day0check.operator.wrap("dsa.index_key")
def key(inner, x, *, norm_bias, **kwargs):
    return inner(x, norm_bias=torch.zeros_like(norm_bias), **kwargs)
