"""The life of our own server: it starts, calls itself ready only when it is, and ends when it is told to."""

from __future__ import annotations

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.evidence import Answer

QUESTION = "Does the server start, answer as soon as it calls itself ready, and end when it is told to?"
NAME = "service.start"
STEPS = ("read headers", "load weights", "verify weights", "partition pools", "warm up operators")


def judge(
    *, why: str, early: str, steps: dict[str, float], code: int | None, forced: bool, operator: str | None = None
) -> Answer:
    """`why`: why it never became ready, and the `operator` that ended its start, if one did; `code`: its exit code
    after SIGTERM; `forced`: it had to be killed."""
    if why:
        text = f"the server did not start: {why}"
        return answered(NAME, [found(NAME, "did not start", text, operator=operator)], "")
    findings = []
    if early:
        findings.append(found(NAME, "ready too early", f"/health was green before the server answered: {early}"))
    missing = [step for step in STEPS if step not in steps]
    if missing:
        text = f"the server calls itself ready without having told of: {', '.join(missing)}"
        findings.append(found(NAME, "steps", text))
    if forced:
        findings.append(found(NAME, "did not end", "the server did not end after SIGTERM and had to be killed"))
    elif code != 0:
        findings.append(found(NAME, "exit code", f"after SIGTERM the server ended with code {code}, not 0"))
    return answered(NAME, findings, f"started in {len(steps)} measured steps, ready when it said so, ended when told")
