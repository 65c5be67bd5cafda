"""The tables of a verdict as people read them: heads, cells as text, and the state that colours a line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from day0check.report import words
from day0check.types import Verdict, to_json


@dataclass(frozen=True)
class Line:
    """One line: its cells, and "failed", "not_run", "passed", "note" or "" for its colour."""

    cells: tuple[str, ...]
    state: str = ""


@dataclass(frozen=True)
class Table:
    """`state_at`: the column whose word carries the state."""

    head: tuple[str, ...]
    rows: tuple[Line, ...] = field(default=())
    title: str = ""
    state_at: int = 0
    filter: bool = False


def check_table(verdict: Verdict) -> Table:
    lines = tuple(
        Line((words.CHECK_WORDS[c.status], c.name, c.case or "–", c.summary or "–"), c.status)
        for c in words.checks_in_order(verdict.checks)
    )
    return Table(("status", "check", "case", "in short"), lines, "Checks", filter=True)


@dataclass(frozen=True)
class Matrix:
    """Cases down, checks across. A cell is (word, state, summary), None where the case has no such check."""

    checks: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, str, str] | None, ...]], ...]


def check_matrix(verdict: Verdict) -> Matrix:
    """Every answer at a glance: of several for one (case, check) the worst; the cases with failures first."""
    cells: dict[tuple[str, str], tuple[str, str, str]] = {}
    for c in reversed(words.checks_in_order(verdict.checks)):
        cells[c.case, c.name] = (words.CHECK_WORDS[c.status], c.status, c.summary)
    names = tuple(dict.fromkeys(c.name for c in verdict.checks))
    cases = tuple(dict.fromkeys(c.case for c in words.checks_in_order(verdict.checks)))
    return Matrix(names, tuple((case or "whole run", tuple(cells.get((case, n)) for n in names)) for case in cases))


def split(table: Table) -> tuple[Table, Table]:
    """(what did not pass, what passed)."""
    passed = tuple(line for line in table.rows if line.state == "passed")
    others = tuple(line for line in table.rows if line.state != "passed")
    return replace(table, rows=others), replace(table, rows=passed)


def not_run_table(verdict: Verdict) -> Table:
    return Table(
        ("what", "why"), tuple(Line((n.check, n.reason), "") for n in verdict.not_run), "What was not run", state_at=-1
    )


def choice_table(verdict: Verdict) -> Table:
    lines = [
        Line(
            (
                "passed" if row.get("passed") else "failed",
                str(row.get("tap", "")),
                str(row.get("phase", "")),
                "own scores" if row.get("seen") == "local" else "against the oracle",
                words.number(row.get("rows")),
                words.number(share_of_limit(row)),
                _statistics(row.get("statistics", {}), row.get("limits", {})),
                str(row.get("pattern") or "–"),
            ),
            "passed" if row.get("passed") else "failed",
        )
        for row in verdict.choices
    ]
    lines.sort(key=lambda line: words.CHECK_ORDER[line.state])
    head = ("status", "tap", "phase", "judged by", "rows", "used", "statistics", "pattern")
    return Table(head, tuple(lines), "Choices", filter=True)


def operator_table(verdict: Verdict) -> Table:
    lines = []
    for row in verdict.operators:
        state = "failed" if row.get("failed") else "not_run" if row.get("not_judged") else "passed"
        lines.append(
            Line(
                (
                    words.CHECK_WORDS[state],
                    str(row.get("operator", "")),
                    str(row.get("kind", "")),
                    words.number(row.get("taps")),
                    words.number(row.get("rows")),
                    str(row.get("statistic") or "–"),
                    words.number(row.get("worst", {}).get(row.get("statistic"))),
                    words.number(row.get("limits", {}).get(row.get("statistic"))),
                    words.number(row.get("used")),
                    words.number(row.get("power")),
                    str(row.get("tap") or "–"),
                    str(row.get("note") or "–"),
                ),
                state,
            )
        )
    lines.sort(key=lambda line: words.CHECK_ORDER[line.state])
    head = ("status", "operator", "kind", "taps", "rows", "worst", "value", "limit", "used", "power", "where", "note")
    return Table(head, tuple(lines), "Operators", filter=True)


def share_of_limit(row: Mapping[str, Any]) -> float | None:
    """The largest statistic / limit of a choice row; None when nothing of it has a limit."""
    shares = []
    for name, limit in row.get("limits", {}).items():
        value = row.get("statistics", {}).get(name)
        if isinstance(value, str) or isinstance(limit, str):  # NaN and infinities travel as words
            shares.append(math.inf)
        elif value is not None and limit is not None:
            shares.append((math.inf if value > 0 else 0.0) if limit == 0 else value / limit)
    return max(shares, default=None)


def _statistics(statistics: Mapping[str, Any], limits: Mapping[str, Any]) -> str:
    parts = []
    for name in sorted(statistics):
        limit = f" of {words.number(limits[name])}" if name in limits else ""
        parts.append(f"{name} {words.number(statistics[name])}{limit}")
    return ", ".join(parts) or "–"


def measured_pairs(verdict: Verdict) -> list[tuple[str, str]]:
    """Times and bytes, without what has a section of its own."""
    record = to_json({k: v for k, v in verdict.measured.items() if k not in ("baseline", "endpoint", "service")})
    return _pairs(record, "")


def _pairs(record: Mapping[str, Any], within: str) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for key in sorted(record):
        value, name = record[key], f"{within} · {key}" if within else str(key)
        if isinstance(value, dict):
            lines.extend(_pairs(value, name))
        elif isinstance(value, list):
            lines.append((name, ", ".join(words.bytes_or_number(key, v) for v in value) or "–"))
        else:
            lines.append((name, words.bytes_or_number(key, value)))
    return lines
