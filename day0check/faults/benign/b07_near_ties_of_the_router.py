"""Router scores add their columns in an order that is drawn anew for every call: near ties fall either way."""

import torch

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-07",
    title="router scores whose near ties fall either way",
    kind="routing",
    visible="last bits of scores; where two are nearly equal, another expert",
    expected=None,
)

DRAWS = torch.Generator().manual_seed(7)
PIECES = 5


@day0check.operator("moe.scores")
def scores(x, *, weight, scoring):
    order = torch.randperm(x.shape[1], generator=DRAWS).to(x.device)
    pieces = [x[:, part].float() @ weight[:, part].float().T for part in order.chunk(PIECES)]
    logits = sum(pieces)
    return torch.sigmoid(logits) if scoring == "sigmoid" else torch.softmax(logits, -1)
