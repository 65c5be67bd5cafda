"""The end token of generation_config.json stands in place of the tokenizer's, which ends turns."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-67",
    title="only one of the end tokens ends an answer",
    kind="serving",
    source="mlx-vlm PR 2112",
    visible="an answer that ends with the token of the end of a turn",
    expected=Address("serve.stop", None, "serve"),
    model="tiny-deepseek-v3.2",
    case="service/embedded",
)


@day0check.operator.wrap("serve.stop")
def stop(inner, text, *, ends, **kwargs):
    return inner(text, ends=ends[:1], **kwargs)
