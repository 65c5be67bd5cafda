"""A request that wants other log-probabilities than its neighbours has its result put in place of theirs."""

import torch

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-65",
    title="log-probabilities of the other requests of a step become minus infinity",
    kind="serving",
    source="vllm PR 51789",
    visible="requests with different wishes about log-probabilities in one step",
    expected=Address("serve.logprobs", None, "serve"),
    model="tiny-deepseek-v3.2",
    case="service/embedded",
    differs="another number of alternatives sets it off, not a list of tokens",
)


@day0check.operator.wrap("serve.logprobs")
def logprobs(inner, logits, *, chosen, top):
    own, ranks, ids, values = inner(logits, chosen=chosen, top=top)
    others = torch.tensor([count < max(top) for count in top], device=own.device)
    return torch.where(others, float("-inf"), own), ranks, ids, values
