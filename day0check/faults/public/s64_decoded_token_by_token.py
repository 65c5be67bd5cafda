"""Every token is decoded by itself, so a character whose bytes lie in several tokens falls to pieces."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-64",
    title="characters of several tokens decoded token by token",
    kind="serving",
    source="dynamo issue 12630",
    visible="characters of more than one byte; never in ASCII",
    expected=Address("serve.detokenise", None, "serve"),
    model="tiny-deepseek-v3.2",
    case="service/embedded",
)


@day0check.operator("serve.detokenise")
def detokenise(tokens, *, pieces, sent, final):
    return "".join(pieces[token].decode("utf-8", errors="replace") for token in tokens[sent:])
