"""The text of an issue about a finding, ready to be filed with whoever wrote the operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from day0check.types import Finding

_SHOWN_PLACES = 8


def issue_text(
    finding: Finding,
    call: Mapping[str, Any] | None,
    tensors: Mapping[str, Any],
    judged: Sequence[tuple[str, Mapping[str, tuple[float, float]]]],
    facts: Mapping[str, str],
    *,
    reason: str = "",
) -> str:
    """Markdown. `call` is None when the finding has no call that can be repeated alone; then `reason` says why."""
    lines = [f"# {title(finding)}", "", finding.message, ""]
    lines += [f"- {name}: {value}" for name, value in (*_address(finding).items(), *facts.items())]
    if call is None:
        return "\n".join([*lines, "", f"There is no reproducer: {reason}.", ""])
    lines += ["", "## To reproduce", "", "```", "python repro.py                     # the recorded result"]
    lines += ["python repro.py FILE.py:FUNCTION    # a function of yours, with the recorded arguments", "```", ""]
    lines += [f"{len(call['position'])} of the {call['rows_of_the_call']} rows of the call{_places(call)}.", ""]
    lines += ["| argument | value |", "|---|---|"]
    lines += [f"| `{name}` | {_value(name, told, tensors)} |" for name, told in call["arguments"].items()]
    lines += ["", "| result | statistic | value | limit |", "|---|---|---|---|"]
    for name, found in judged:
        lines += [f"| `{name}` | {word} | {value:.4g} | {limit:g} |" for word, (value, limit) in found.items()]
    if all(value <= limit for _, found in judged for value, limit in found.values()):
        lines += [
            "",
            "All of these are within their limits: the finding above rests on finer statistics, or on more calls.",
        ]
    return "\n".join([*lines, ""])


def title(finding: Finding) -> str:
    """Operator, layer and phase in one line."""
    layer = "" if finding.layer is None else f" in layer {finding.layer}"
    return f"{finding.operator or finding.check}{layer}{f' ({finding.phase})' if finding.phase else ''} is wrong"


def _address(finding: Finding) -> dict[str, str]:
    told = {"finding": finding.id, "check": finding.check, "tap": finding.evidence.get("tap", "")}
    told |= {"request": finding.request, "position": finding.position}
    return {name: str(value) for name, value in told.items() if value not in (None, "")}


def _places(call: Mapping[str, Any]) -> str:
    shown = [
        f"{call['requests'][owner]} position {position}"
        for owner, position in zip(call["owner"], call["position"], strict=True)
        if owner >= 0
    ]
    if not shown:
        return ""
    more = f" and {len(shown) - _SHOWN_PLACES} more" if len(shown) > _SHOWN_PLACES else ""
    return f": {', '.join(shown[:_SHOWN_PLACES])}{more}"


def _value(name: str, told: Mapping[str, Any], tensors: Mapping[str, Any]) -> str:
    if "tensor" in told:
        tensor = tensors[f"argument.{name}"]
        return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    return f"`{told['record']}`" if "record" in told else f"`{told['value']}`"
