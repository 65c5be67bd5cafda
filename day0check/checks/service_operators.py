"""The replay of our own server's operators, call by call, while it answered."""

from __future__ import annotations

from collections.abc import Sequence

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.evidence import Answer
from day0check.types import Finding, Measure

QUESTION = "Is every piece of an answer what the reference hands out of the same tokens, call by call?"
NAME = "service.operators"
OF_CHAT = ("serve.reasoning", "serve.tool_call")


def judge(measures: Sequence[Measure] | None, *, chat: bool = True, reason: str = "") -> Answer:
    """`measures`: what the server kept, None when it kept nothing, and then `reason` says why. `chat`: whether the
    model has a chat at all; without one nothing asks for thoughts and tool calls."""
    if not measures or not any(m.rows for m in measures):
        return answered(NAME, (), "", not_run=reason or "the server kept no replay of its operators")
    findings = [_finding(m) for m in sorted(measures, key=lambda m: m.order) if m.failing]
    idle = [m.operator for m in measures if m.not_judged and (chat or m.operator not in OF_CHAT)]
    not_run = f"not called: {', '.join(idle)}" if idle else ""
    called = sum(m.rows > 0 for m in measures)
    return answered(NAME, findings, f"{called} operators are the reference's in every call", not_run=not_run)


def _finding(m: Measure) -> Finding:
    wrong = int(m.statistics["wrong_calls"])
    text = f"{m.operator}: {wrong} of {m.rows} calls give another result than the reference: {m.message}"
    return found(NAME, m.pattern, text, operator=m.operator, value=float(wrong), limit=0.0, order=m.order)
