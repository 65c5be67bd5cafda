"""Top-k by coarse buckets whose threshold bucket has room for a few candidates alone."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-06",
    title="candidates beyond the room of the threshold bucket are dropped in order of arrival",
    kind="index",
    source="sglang issue 36807, vllm PR 55314, sglang issue 35257",
    visible="rows with more scores in one bucket than its buffer holds",
    expected=Address("dsa.select", 3, "prefill"),
    differs="few keys and a small buffer stand for very long rows",
)
ROOM = 12
BUCKETS = 8


@day0check.operator("dsa.select")
def select(scores, *, k, visible, threshold=None):
    found = torch.full((scores.shape[0], k), -1, dtype=torch.int32, device=scores.device)
    for row, length in enumerate(visible.tolist()):
        mine = scores[row, :length]
        low, high = mine.amin(), mine.amax()
        bucket = ((mine - low) / (high - low).clamp(min=1e-9) * (BUCKETS - 1)).floor()
        edge = bucket[mine.topk(min(k, length)).indices[-1]]
        above, inside = (bucket > edge).nonzero().flatten(), (bucket == edge).nonzero().flatten()[:ROOM]
        refined = inside[mine[inside].topk(min(len(inside), k - len(above))).indices]
        chosen = torch.cat((above, refined))
        found[row, : len(chosen)] = chosen.to(torch.int32)
    return found
