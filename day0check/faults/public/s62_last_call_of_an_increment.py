"""The streaming parser takes the last complete call out of what arrived together, and drops the ones before it."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-62",
    title="of several tool calls in one increment only the last is handed out",
    kind="serving",
    source="sglang issue 35563",
    visible="when several calls reach the parser at once",
    expected=Address("serve.tool_call", None, "serve"),
    model="tiny-deepseek-v3.2",
    case="service/embedded",
)


@day0check.operator.wrap("serve.tool_call")
def tool_call(inner, text, *, sent, schemas, final):
    content, calls = inner(text, sent=sent, schemas=schemas, final=final)
    return content, calls[-1:]
