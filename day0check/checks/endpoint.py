"""The checks of a live endpoint, in order of accusation; apart from those of a case, since no engine is looked into."""

from __future__ import annotations

from types import ModuleType

from day0check.checks import (
    endpoint_cancel,
    endpoint_images,
    endpoint_interference,
    endpoint_logprobs,
    endpoint_needle,
    endpoint_oracle,
    endpoint_parameters,
    endpoint_protocol,
    endpoint_soak,
    endpoint_speed,
    endpoint_tools,
    endpoint_turns,
    endpoint_usage,
    endpoint_wire,
)
from day0check.checks.endpoint_answer import CASE
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed

ENDPOINT_CHECKS: dict[str, ModuleType] = {
    module.NAME: module
    for module in (
        endpoint_protocol,
        endpoint_tools,
        endpoint_wire,
        endpoint_logprobs,
        endpoint_oracle,
        endpoint_parameters,
        endpoint_usage,
        endpoint_turns,
        endpoint_images,
        endpoint_interference,
        endpoint_cancel,
        endpoint_needle,
        endpoint_soak,
        endpoint_speed,
    )
}
PART_OF = {
    endpoint_parameters.NAME: "parameters",
    endpoint_tools.NAME: "tools",
    endpoint_wire.NAME: "wire",
    endpoint_usage.NAME: "parameters",
    endpoint_turns.NAME: "wire",
    endpoint_images.NAME: "wire",
    endpoint_interference.NAME: "interference",
    endpoint_cancel.NAME: "interference",
    endpoint_needle.NAME: "needle",
    endpoint_soak.NAME: "soak",
    endpoint_speed.NAME: "speed",
}

__all__ = ["CASE", "ENDPOINT_CHECKS", "endpoint_checks_of", "judge_endpoint"]


def endpoint_checks_of(parts: tuple[str, ...], *, reference: bool) -> tuple[str, ...]:
    """Names of the checks that the asked parts need; the reference's own only when there is one."""
    return tuple(
        name
        for name in ENDPOINT_CHECKS
        if (PART_OF[name] in parts if name in PART_OF else name != endpoint_oracle.NAME or reference)
    )


def judge_endpoint(observed: Observed, *, reference: bool, sees: bool | None = None) -> tuple[Answer, ...]:
    """The answers of all checks that the asked parts need, in order."""
    answers = []
    for name in endpoint_checks_of(observed.parts, reference=reference):
        if name == endpoint_images.NAME:
            answers.append(endpoint_images.judge(observed, sees=sees))
        else:
            answers.append(ENDPOINT_CHECKS[name].judge(observed))
    return tuple(answers)
