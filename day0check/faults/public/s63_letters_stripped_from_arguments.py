"""The end tag of a value is taken off as a set of letters, so that values lose their own last letters."""

import re

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-63",
    title='letters of "parameter" stripped from the end of argument values',
    kind="serving",
    source="sglang PR 34600",
    visible="values that end in one of these letters",
    expected=Address("serve.tool_call", None, "serve"),
    model="tiny-deepseek-v3.2",
    case="service/embedded",
    differs="a value is handed out when its end tag has come, not as it grows",
)
_LETTERS = "parameter"
_VALUE = re.compile(r"(?<=<arg_value>)(.*?)(?=</arg_value>)", re.DOTALL)
_OPEN = re.compile(r"<arg_value>(?!.*</arg_value>).*\Z", re.DOTALL)


def _stripped(text):
    return _OPEN.sub("<arg_value>", _VALUE.sub(lambda value: value[0].rstrip(_LETTERS), text))


@day0check.operator.wrap("serve.tool_call")
def tool_call(inner, text, *, sent, schemas, final):
    content, calls = inner(_stripped(text), sent=0, schemas=schemas, final=final)
    known_content, known = inner(_stripped(text[:sent]), sent=0, schemas=schemas, final=False)
    more = []
    for number, (index, name, arguments) in enumerate(calls):
        old = known[number][2] if number < len(known) else ""
        if number >= len(known) or len(arguments) > len(old):
            more.append((index, "" if number < len(known) else name, arguments[len(old) :]))
    return content[len(known_content) :], tuple(more)
