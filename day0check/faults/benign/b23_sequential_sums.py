"""Float32 sums of the router, the index and the head run over eight pieces in order."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-23",
    title="another order of float32 sums",
    kind="routing",
    visible="last bits of float32",
    expected=None,
)

PIECES = 8


def _product(x, weight):
    pieces = zip(x.float().chunk(PIECES, -1), weight.float().chunk(PIECES, -1), strict=True)
    return sum(a @ b.T for a, b in pieces)


@day0check.operator("moe.scores")
def scores(x, *, weight, scoring):
    return torch.sigmoid(_product(x, weight))


@day0check.operator("dsa.index_weights")
def index_weights(x, *, weight):
    return _product(x, weight) * weight.shape[0] ** -0.5


@day0check.operator("head.logits")
def logits(x, *, weight):
    return _product(x, weight)
