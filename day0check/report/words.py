"""The words that every view shares: status words, the one sentence, addresses and numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from day0check.types import CheckOutcome, Finding, Verdict

STATUS_WORDS = {
    "ready": "READY",
    "not_ready": "NOT READY",
    "inconclusive": "INCONCLUSIVE",
    "error": "ERROR OF THE HARNESS",
}
CHECK_ORDER = {"failed": 0, "not_run": 1, "passed": 2}
CHECK_WORDS = {"failed": "failed", "not_run": "not run", "passed": "passed"}
_SEVERITY_ORDER = {"blocker": 0, "warning": 1, "note": 2}


def status_word(verdict: Verdict) -> str:
    return STATUS_WORDS[verdict.status]


def sentence(verdict: Verdict) -> str:
    """The one sentence that a reader takes away: why the status is what it is."""
    if verdict.status == "ready":
        waived = sum(f.waived for f in verdict.findings)
        tail = f" {count(waived, 'finding')} waived." if waived else ""
        return f"{count(len(verdict.checks), 'check')} in {count(len(verdict.cases), 'case')} ran and passed.{tail}"
    if verdict.status == "inconclusive":
        if not verdict.not_run:
            return "No check ran, so nothing can be said."
        first = verdict.not_run[0]
        return f"{count(len(verdict.not_run), 'check')} did not run. First: {first.check}: {first.reason}."
    if verdict.first_fault is not None:
        lead = "The harness itself is at fault" if verdict.status == "error" else "First fault"
        return f"{lead}: {verdict.first_fault.message}"
    failed = next((c for c in verdict.checks if c.status == "failed"), None)
    return f"Check {failed.name} failed: {failed.summary or 'it named no finding'}." if failed else "See the findings."


def address(finding: Finding) -> str:
    """Operator, layer, phase, request and position, as far as they are known."""
    parts = (
        finding.operator,
        None if finding.layer is None else f"layer {finding.layer}",
        finding.phase,
        finding.request,
        None if finding.position is None else f"position {finding.position}",
    )
    return " · ".join(p for p in parts if p)


def number(value: Any) -> str:
    """A number as people read it: 4 significant digits, 'not a number' and 'infinite' in words, '–' for nothing."""
    if value is None or value == "" or isinstance(value, (dict, list, tuple)):
        return "–" if not value else str(value)
    if isinstance(value, str):
        return {"NaN": "not a number", "Infinity": "infinite", "-Infinity": "-infinite"}.get(value, value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "not a number"
    if math.isinf(value):
        return "infinite" if value > 0 else "-infinite"
    return f"{value:.4g}"


def size(value: Any) -> str:
    """Bytes as people read them."""
    if not isinstance(value, (int, float)):
        return number(value)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return str(value)


def count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def fused(verdict: Verdict) -> str:
    """The groups of operators that the candidate ran as one; empty where there are none."""
    groups = verdict.measured.get("fused")
    return ", ".join(f"{group} ({count(n, 'call')})" for group, n in groups.items()) if isinstance(groups, dict) else ""


def checks_in_order(checks: Iterable[CheckOutcome]) -> list[CheckOutcome]:
    """Failures first, then what was not run; the order of the run inside."""
    return sorted(checks, key=lambda c: CHECK_ORDER[c.status])


def findings_in_order(findings: Sequence[Finding], *, first: Finding | None = None) -> list[Finding]:
    """The first fault, then blockers, warnings, notes, waived ones last; the order of the run inside."""
    return sorted(findings, key=lambda f: (f != first, f.waived, _SEVERITY_ORDER[f.severity]))


def pairs(record: dict[str, Any], *, within: str = "") -> list[tuple[str, str]]:
    """A nested record as flat (name, text) lines, names joined by dots, sorted."""
    lines: list[tuple[str, str]] = []
    for key in sorted(record):
        value, name = record[key], f"{within}.{key}" if within else str(key)
        if isinstance(value, dict) and value:
            lines.extend(pairs(value, within=name))
        elif isinstance(value, (list, tuple)):
            lines.append((name, ", ".join(str(v) for v in value) or "–"))
        else:
            lines.append((name, value if isinstance(value, str) and value else number(value)))
    return lines


def bytes_or_number(name: str, value: Any) -> str:
    """A figure whose name carries its unit: `..._bytes`, `..._s` and `..._ms` are read as such."""
    if name.endswith("bytes"):
        return size(value)
    for suffix, unit in (("_ms", "ms"), ("_seconds", "s"), ("_s", "s")):
        if (name.endswith(suffix) or name == suffix[1:]) and isinstance(value, (int, float)):
            return f"{value:.3g} {unit}"
    return number(value)
