"""Guards what is said of answers whose text was known beforehand."""

from __future__ import annotations

import dataclasses
import json

import pytest

from day0check.checks.endpoint import protocol, tools
from day0check.checks.evidence import Answer as Judged
from day0check.load.observed import Observed
from day0check.load.records import Answer, Exchange, Reply, ToolCall
from day0check.load.scripted import LONGEST_STOP, PROBE, SCRIPTS, Script

REPLY = Reply(200, 0, 0, 1)


def right(script: Script) -> Answer:
    calls = tuple(ToolCall(c.name, json.dumps(c.arguments)) for c in script.calls)
    return Answer(text=script.content, reasoning=script.thoughts, calls=calls, finish="length", choices=1)


def exchange(label: str, answer: Answer) -> Exchange:
    return Exchange(label, "/v1/chat/completions", {}, REPLY, answer)


def judged(changed: dict[str, Answer], *, ends: dict[int, Answer] | None = None) -> Judged:
    """The check's answer when the answers of `changed` (by script) come streamed, and all others are right."""
    exchanges = [exchange("forced", Answer(text=PROBE, choices=1))]
    for script in SCRIPTS:
        exchanges.append(exchange(f"script/{script.name}/whole", right(script)))
        exchanges.append(exchange(f"script/{script.name}/stream", changed.get(script.name, right(script))))
    exchanges += [exchange(f"end/{token}", answer) for token, answer in (ends or {}).items()]
    return tools.judge(Observed("m", "chat", ("tools",), done=("tools",), exchanges=tuple(exchanges)))


def test_right_answers_raise_nothing() -> None:
    """Would catch a script that contradicts itself."""
    answer = judged({}, ends={7: Answer(text=PROBE, finish="stop", choices=1)})
    assert answer.findings == ()
    assert answer.outcome.status == "passed"
    assert len({s.name for s in SCRIPTS}) == len(SCRIPTS)
    assert all(len(s.stop[0]) <= LONGEST_STOP for s in SCRIPTS if s.at_once)


BY_NAME = {s.name: right(s) for s in SCRIPTS}


def changed(name: str, **fields) -> dict[str, Answer]:  # type: ignore[no-untyped-def]
    return {name: dataclasses.replace(BY_NAME[name], **fields)}


@pytest.mark.parametrize(
    ("answers", "pattern", "operator"),
    [
        (changed("characters", text="Gr\ufffd\ufffd"), "broken character", "serve.detokenise"),
        (changed("characters", text=BY_NAME["characters"].text[1:]), "content", "serve.detokenise"),
        (changed("no_call", text="a "), "content", "serve.tool_call"),
        (changed("one_call", calls=()), "calls", "serve.tool_call"),
        (changed("one_call", calls=(ToolCall("find", '{"path": "/"}'),)), "argument", "serve.tool_call"),
        (changed("one_call", calls=(ToolCall("find", '{"path": "/tmp"'),)), "arguments", "serve.tool_call"),
        (changed("one_call", calls=(ToolCall("find", '{"path": "/tmp", "x": 1}'),)), "argument", "serve.tool_call"),
        (changed("calls_at_once", calls=BY_NAME["calls_at_once"].calls[-1:]), "calls", "serve.tool_call"),
        (changed("thoughts", reasoning="", text="<think>"), "thoughts", "serve.reasoning"),
        (
            changed("thoughts_then_call", reasoning="I need a tool. <tool_call>", calls=()),
            "thoughts",
            "serve.reasoning",
        ),
    ],
)
def test_each_fault_has_its_operator(answers: dict[str, Answer], pattern: str, operator: str) -> None:
    """Would catch a fault of one parser that is laid on another."""
    answer = judged(answers)
    assert [(f.evidence["pattern"], f.operator) for f in answer.findings] == [(pattern, operator)]


def test_an_integer_that_comes_as_text_is_told() -> None:
    """Would catch a parser that ignores the types of the tool's schema."""
    (call,) = BY_NAME["types"].calls
    arguments = json.loads(call.arguments) | {"days": "3"}
    answer = judged(changed("types", calls=(ToolCall("weather", json.dumps(arguments)),)))
    assert "'3', 3 was written" in answer.outcome.summary


def test_an_answer_that_goes_on_behind_its_end_is_told() -> None:
    """Would catch a server that takes only one of the end tokens for one."""
    answer = judged({}, ends={7: Answer(text=PROBE + PROBE, finish="length", choices=1)})
    assert [(f.evidence["pattern"], f.operator) for f in answer.findings] == [("end token", "serve.stop")]


def test_known_answers_that_did_not_come_are_not_passed() -> None:
    """Would catch a server that answers none of the scripts and passes."""
    silent = Observed("m", "chat", ("tools",), exchanges=(exchange("forced", Answer(text=PROBE, choices=1)),))
    assert tools.judge(silent).outcome.status == "not_run"
    assert tools.judge(Observed("m", "chat", ("tools",))).outcome.status == "not_run"


@pytest.mark.parametrize(("ends", "blamed"), [((70, 95), False), ((10, 40), True), ((), True)])
def test_a_request_that_waits_its_turn_is_not_forgotten(ends: tuple[int, ...], blamed: bool) -> None:
    """Would catch a queue that is blamed for its length, and one request of many that is dropped without a word."""
    silent = Exchange("surge/together/9", "/", {}, Reply(0, 0, 0, 100, fault="stalled"), Answer())
    others = [
        Exchange(f"surge/together/{i}", "/", {}, Reply(200, 0, 0, end), Answer(text="x", choices=1))
        for i, end in enumerate(ends)
    ]
    observed = Observed("m", "chat", ("interference",), exchanges=(silent, *others))
    patterns = {f.evidence["pattern"] for f in protocol.judge(observed).findings}
    assert ("stalled" in patterns) == blamed
