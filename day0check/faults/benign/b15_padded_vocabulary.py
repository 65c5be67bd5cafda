"""The head is wider than the tokenizer: what stands behind its last token is masked before a token is chosen."""

import day0check
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-15",
    title="entries behind the last token are masked before the choice",
    kind="output",
    visible="nowhere: no such entry is chosen",
    expected=None,
)

TOKENS = 300  # of 320; the presets' last special token is far below it


@day0check.operator.wrap("sample.token")
def sample(inner, logits, **kwargs):
    masked = logits.clone()
    masked[:, TOKENS:] = float("-inf")
    return inner(masked, **kwargs)
