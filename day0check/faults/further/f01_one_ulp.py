"""One element of one row is off by one unit in the last place."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-01",
    title="one element is one ulp off",
    kind="attention",
    visible="one element of the result",
    expected=Address("mla.latent", 3, "prefill", position=10),
)

ROW, COLUMN = 10, 7


@day0check.operator.wrap("mla.latent", phase="prefill")
def latent(inner, x, **kwargs):
    y = inner(x, **kwargs)
    y.view(torch.int16)[ROW, COLUMN] += 1
    return y
