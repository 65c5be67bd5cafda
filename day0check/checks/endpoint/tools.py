"""Known answers against what came of them: characters, thoughts, tool calls and the tokens that end an answer."""

from __future__ import annotations

import json
from typing import Any

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.endpoint.compare import first_difference, full_text, shown
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed
from day0check.load.records import Exchange
from day0check.load.scripted import PROBE, SCRIPTS, Script, forces
from day0check.types import Finding

QUESTION = "Are characters, thoughts, tool calls and end tokens of an answer handed out as they are?"
NAME = "endpoint.tools"
DETOKENISE, STOP, REASONING, CALLS = "serve.detokenise", "serve.stop", "serve.reasoning", "serve.tool_call"


def judge(observed: Observed) -> Answer:
    """Known answers where the endpoint let us prescribe them, else its own calls whole against streamed."""
    if forces(observed.get("forced")):
        return _judge_scripts(observed)
    if observed.api == "completions" and "tools" in observed.done:
        return answered(NAME, (), "the endpoint has no chat, so no tool calls either")
    return _judge_natural(observed)


# ------------------------------------------------------------------------------------------------- known answers


def _judge_scripts(observed: Observed) -> Answer:
    findings: dict[str, Finding] = {}
    unanswered, judged = "", 0
    for script in SCRIPTS:
        for way in ("whole", "stream"):
            e = observed.get(f"script/{script.name}/{way}")
            if e is None or not e.good:
                unanswered = unanswered or f"the known answer {script.name}, {way}, did not come"
                continue
            judged += 1
            wrong = _script_finding(script, e)
            if wrong is not None:
                findings.setdefault(wrong.id, wrong)
    ended = _ends(observed)
    for finding in ended:
        findings.setdefault(finding.id, finding)
    ends = len(observed.under("end"))
    summary = f"{judged} known answers came as they are; {ends} tokens that must end an answer did"
    return answered(NAME, list(findings.values()), summary, not_run=unanswered)


def _script_finding(script: Script, e: Exchange) -> Finding | None:
    """What of a known answer is wrong first, in the order in which a server makes it: characters, thoughts, calls."""
    a, label = e.answer, e.label
    flat = a.reasoning + a.text + "".join(c.name + c.arguments for c in a.calls)
    if "\ufffd" in flat and "\ufffd" not in script.text:
        text = f"{label!r}: characters of more than one byte come as U+FFFD: {shown(flat, flat.index(chr(0xFFFD)))}"
        return found(NAME, "broken character", text, operator=DETOKENISE, label=label)
    if a.reasoning != script.thoughts:
        kept = " and holds the tool call, which nobody will carry out" if "<tool_call>" in a.reasoning else ""
        text = f"{label!r}: the reasoning is {shown(a.reasoning)}, {shown(script.thoughts)} was thought{kept}"
        return found(NAME, "thoughts", text, operator=REASONING, label=label)
    if a.text != script.content:
        at = first_difference(a.text, script.content) or 0
        operator = CALLS if script.calls or "<tool" in script.content else DETOKENISE
        text = f"{label!r}: from character {at} on the content is {shown(a.text, at)}, not {shown(script.content, at)}"
        return found(NAME, "content", text, operator=operator, label=label)
    return _calls_finding(script, e)


def _calls_finding(script: Script, e: Exchange) -> Finding | None:
    calls, label = e.answer.calls, e.label
    names = [c.name for c in calls]
    if names != [c.name for c in script.calls]:
        how = " at once" if script.at_once else ""
        text = f"{label!r}: of {len(script.calls)} tool calls that were written{how}, {len(calls)} came: {names}"
        return found(NAME, "calls", text, operator=CALLS, label=label)
    for number, (got, wanted) in enumerate(zip(calls, script.calls, strict=True)):
        arguments = _object(got.arguments)
        if arguments is None:
            text = f"{label!r}: the arguments of call {number} are no JSON object: {shown(got.arguments)}"
            return found(NAME, "arguments", text, operator=CALLS, label=label)
        for key, value in wanted.arguments.items():
            if key not in arguments or arguments[key] != value or type(arguments[key]) is not type(value):
                text = f"{label!r}: argument {key} of call {number} is {arguments.get(key)!r}, {value!r} was written"
                return found(NAME, "argument", text, operator=CALLS, label=label)
        if len(arguments) != len(wanted.arguments):
            text = f"{label!r}: call {number} has arguments {sorted(arguments)} of which some were never written"
            return found(NAME, "argument", text, operator=CALLS, label=label)
    return None


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _ends(observed: Observed) -> list[Finding]:
    """An answer must end at every end token that the model's files name, whichever file it is."""
    findings = []
    for token, e in observed.under("end").items():
        if not e.good or (e.answer.text == PROBE and e.answer.finish == "stop"):
            continue
        text = (
            f"token {token} must end an answer, but it went on with {shown(full_text(e.answer), len(PROBE))} and "
            f"finish reason {e.answer.finish!r}"
        )
        findings.append(found(NAME, "end token", text, operator=STOP, label=e.label))
    return findings


# --------------------------------------------------------------------------------------------------- its own calls


def _judge_natural(observed: Observed) -> Answer:
    asked = {label: e for label, e in observed.under("tools").items() if label != "without"}
    if not asked:
        return answered(NAME, (), "", not_run="no request for a tool was sent")
    findings = []
    for label, e in asked.items():
        if e.good:
            findings += [_finding for _finding in (_arguments(e), _ignored(observed, e, label)) if _finding]
    for choice in ("auto", "named"):
        whole, stream = asked.get(f"{choice}/whole"), asked.get(f"{choice}/stream")
        if whole is not None and stream is not None and whole.good and stream.good:
            findings += _both_ways(whole, stream)
    called = sum(len(e.answer.calls) for e in asked.values() if e.good)
    refused = [e for e in asked.values() if e.refused]
    if len(refused) == len(asked):
        return answered(NAME, findings, f"tools are refused with a clear 4xx: {refused[0].answer.error}")
    not_run = "" if called else "the model called no tool, so the parser of tool calls was not exercised"
    unique = {f.id: f for f in findings}
    return answered(NAME, list(unique.values()), f"{called} tool calls, the same whole and streamed", not_run=not_run)


def _arguments(e: Exchange) -> Finding | None:
    """Arguments of a finished call are a JSON object; one that was cut off by its length may break off anywhere."""
    if e.answer.finish == "length":
        return None
    for call in e.answer.calls:
        if _object(call.arguments) is None:
            text = f"{e.label!r}: the arguments of a finished call are no JSON object: {shown(call.arguments)}"
            return found(NAME, "arguments", text, operator=CALLS, label=e.label)
    return None


def _ignored(observed: Observed, e: Exchange, label: str) -> Finding | None:
    """Tools that do not lengthen the prompt are not shown to the model."""
    without = observed.get("tools/without")
    if without is None or not without.good or label != "auto/whole" or e.answer.calls:
        return None
    one, two = without.answer.usage, e.answer.usage
    if one is None or two is None or two.prompt_tokens > one.prompt_tokens:
        return None
    text = f"tools are accepted and not shown to the model: the prompt has {two.prompt_tokens} tokens with and without"
    return found(NAME, "tools ignored", text, severity="warning", label=e.label)


def _both_ways(whole: Exchange, stream: Exchange) -> list[Finding]:
    if whole.answer.calls == stream.answer.calls:
        return []
    text = (
        f"{stream.label!r}: streamed, the tool calls are {shown(stream.answer.tool_calls)}, whole "
        f"{shown(whole.answer.tool_calls)}"
    )
    return [found(NAME, "both ways", text, operator=CALLS, label=stream.label)]
