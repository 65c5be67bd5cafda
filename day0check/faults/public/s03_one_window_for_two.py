"""The key windows of a ragged batch are built from the offsets of its queries."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-03",
    title="ragged prefill takes the window of its keys from the offset of its queries",
    kind="index",
    source="sglang PR 12583",
    visible="from the second request of a batch on, when a request has more keys in memory than rows in the step",
    expected=Address("dsa.score", 3, "prefill", request="b"),
    case="batch",
)


@day0check.operator.wrap("dsa.score", phase="prefill")
def score(inner, q, *, keys, owner, **kwargs):
    """Keys of all requests lie end to end, `n` each; request b should begin at b * n."""
    requests, n = keys.shape[:2]
    flat = torch.cat((keys.flatten(0, 1), keys.flatten(0, 1)))
    begins = [int((owner < b).sum()) for b in range(requests)]
    return inner(q, keys=torch.stack([flat[begin : begin + n] for begin in begins]), owner=owner, **kwargs)
