"""The key of a block keeps too little of the image: two pictures under one id share what was computed."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-51",
    title="pictures are told apart by an id in which they agree",
    kind="vision",
    source="LMCache PR 4783, issue 4086",
    visible="two pictures whose ids agree, under the same words",
    expected=Address("prefix.match", None, "prefill"),
    case="prefix_images",
    differs="no bit of the id is left, so that any two pictures agree in it",
)
ENTRY_COLUMN, PARENT, SNAPSHOT, HEAD = 0, 1, 3, 5


@day0check.operator("prefix.match")
def match(tokens, *, salts, held):
    page = (held.shape[1] - HEAD) // 3
    found, parent = [], 0
    for first in range(0, len(tokens) - page + 1, page):
        same = (held[:, ENTRY_COLUMN] > 0) & (held[:, PARENT] == parent) & (held[:, SNAPSHOT] >= 0)
        same &= (held[:, HEAD : HEAD + page] == tokens[first : first + page]).all(1)
        if not bool(same.any()):
            break
        found.append(int(same.nonzero()[0]))
        parent = int(held[found[-1], ENTRY_COLUMN])
    return torch.tensor(found, dtype=torch.int64)
