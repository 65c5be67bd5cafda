"""The rank of a chosen token counts those that are better, and not itself."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-133",
    title="ranks of log-probabilities count from zero",
    kind="serving",
    visible="requests that ask for log-probabilities",
    expected=Address("serve.logprobs", None, "serve"),
    model="tiny-deepseek-v3.2",
    case="service/embedded",
)


@day0check.operator.wrap("serve.logprobs")
def logprobs(inner, logits, **kwargs):
    logprob, rank, ids, values = inner(logits, **kwargs)
    return logprob, rank - 1, ids, values
