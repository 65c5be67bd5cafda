"""The checks of a live endpoint, in order of accusation; apart from those of a case, since no engine is looked into."""

from __future__ import annotations

from types import ModuleType

from day0check.checks.endpoint import (
    cancel,
    images,
    interference,
    logprobs,
    needle,
    oracle,
    parameters,
    protocol,
    soak,
    speed,
    tools,
    turns,
    usage,
    wire,
)
from day0check.checks.endpoint.answer import CASE
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed

ENDPOINT_CHECKS: dict[str, ModuleType] = {
    module.NAME: module
    for module in (
        protocol,
        tools,
        wire,
        logprobs,
        oracle,
        parameters,
        usage,
        turns,
        images,
        interference,
        cancel,
        needle,
        soak,
        speed,
    )
}
PART_OF = {
    parameters.NAME: "parameters",
    tools.NAME: "tools",
    wire.NAME: "wire",
    usage.NAME: "parameters",
    turns.NAME: "wire",
    images.NAME: "wire",
    interference.NAME: "interference",
    cancel.NAME: "interference",
    needle.NAME: "needle",
    soak.NAME: "soak",
    speed.NAME: "speed",
}

__all__ = ["CASE", "ENDPOINT_CHECKS", "endpoint_checks_of", "judge_endpoint"]


def endpoint_checks_of(parts: tuple[str, ...], *, reference: bool) -> tuple[str, ...]:
    """Names of the checks that the asked parts need; the reference's own only when there is one."""
    return tuple(
        name
        for name in ENDPOINT_CHECKS
        if (PART_OF[name] in parts if name in PART_OF else name != oracle.NAME or reference)
    )


def judge_endpoint(observed: Observed, *, reference: bool, sees: bool | None = None) -> tuple[Answer, ...]:
    """The answers of all checks that the asked parts need, in order."""
    answers = []
    for name in endpoint_checks_of(observed.parts, reference=reference):
        if name == images.NAME:
            answers.append(images.judge(observed, sees=sees))
        else:
            answers.append(ENDPOINT_CHECKS[name].judge(observed))
    return tuple(answers)
