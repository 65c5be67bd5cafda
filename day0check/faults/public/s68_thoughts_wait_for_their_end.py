"""The splitter of thoughts waits for their end tag; a model that goes straight to a tool call is all thought."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-68",
    title="a tool call behind unfinished thoughts is handed out as thought",
    kind="serving",
    source="vllm PR 33646",
    visible="thoughts that a tool call ends, without their tag",
    expected=Address("serve.reasoning", None, "serve"),
    model="tiny-deepseek-v3.2",
    case="service/embedded",
)
_TAG, _MASK = "<tool_call>", "<tool_cal1>"  # of one length: the splitter does not see the tag, the text stays


@day0check.operator.wrap("serve.reasoning")
def reasoning(inner, text, *, sent, final):
    thoughts, content = inner(text.replace(_TAG, _MASK), sent=sent, final=final)
    return thoughts.replace(_MASK, _TAG), content.replace(_MASK, _TAG)
