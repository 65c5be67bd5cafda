"""The prefix cache hashes four tokens where a block has sixteen, and takes a block whose beginning fits."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-14",
    title="a block is found by the hash of its first four tokens",
    kind="cache",
    source="Mooncake issue 4153",
    visible="prompts that part inside a block",
    expected=Address("prefix.match", None, "prefill"),
    case="prefix",
)
ENTRY_COLUMN, PARENT, SNAPSHOT, HEAD, UNIT = 0, 1, 3, 5, 4


@day0check.operator.wrap("prefix.match")
def match(inner, tokens, *, salts, held):
    page = (held.shape[1] - HEAD) // 3
    found, parent = [], 0
    for first in range(0, len(tokens) - page + 1, page):
        same = (held[:, ENTRY_COLUMN] > 0) & (held[:, PARENT] == parent) & (held[:, SNAPSHOT] >= 0)
        same &= (held[:, HEAD : HEAD + UNIT] == tokens[first : first + UNIT]).all(1)
        if not bool(same.any()):
            break
        found.append(int(same.nonzero()[0]))
        parent = int(held[found[-1], ENTRY_COLUMN])
    return torch.tensor(found, dtype=torch.int64)
