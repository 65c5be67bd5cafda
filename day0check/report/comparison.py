"""The comparison with a baseline as people read it: from `measured.baseline`, which `baseline.py` writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from day0check.report import words
from day0check.report.rows import Line, Table
from day0check.types import Verdict

_STATES = {"failed": "failed", "straddles": "note", "too few": "note", "passed": "passed", "changed": "note"}


@dataclass(frozen=True)
class Section:
    sentence: str
    tables: tuple[Table, ...]


def baseline_section(verdict: Verdict) -> Section | None:
    record = verdict.measured.get("baseline")
    if not isinstance(record, dict):
        return None
    tables = (_numbers(record), _speed(record), _memory(record), _changes(record))
    return Section(str(record.get("sentence", "")), tuple(t for t in tables if t.rows))


def _numbers(record: dict[str, Any]) -> Table:
    lines = tuple(
        _line(
            row,
            str(row.get("operator", "")),
            f"{words.number(row.get('bits_changed'))} of {words.number(row.get('taps'))}",
            str(row.get("statistic") or "–"),
            words.number(row.get("was")),
            words.number(row.get("now")),
        )
        for row in record.get("numbers", ())
    )
    return Table(("status", "operator", "taps with other bits", "statistic", "was", "now"), lines, "Numbers")


def _speed(record: dict[str, Any]) -> Table:
    lines = tuple(
        _line(
            row,
            str(row.get("what", "")),
            words.number(row.get("ratio")),
            f"{words.number(row.get('low'))} to {words.number(row.get('high'))}",
            words.number(row.get("fair_ratio")),
            words.number(row.get("wall_ratio")),
            f"{words.number(row.get('limit'))}, effect over {words.number(row.get('floor'))}",
            words.number(row.get("samples")),
        )
        for row in record.get("speed", ())
    )
    clocks = ("now / then", "95 % interval", "machine's speed left in", "waiting left in, too")
    head = ("status", "what", *clocks, "fails beyond", "samples")
    return Table(head, lines, "Speed")


def _memory(record: dict[str, Any]) -> Table:
    lines = tuple(
        _line(
            row,
            str(row.get("what", "")),
            words.size(row.get("was_bytes")),
            words.size(row.get("now_bytes")),
            words.number(row.get("limit")),
        )
        for row in record.get("memory", ())
    )
    return Table(("status", "what", "then", "now", "fails beyond (ratio)"), lines, "Memory")


def _changes(record: dict[str, Any]) -> Table:
    lines = tuple(Line((str(change),), "") for change in record.get("environment_changes", ()))
    return Table(("what changed in the environment since",), lines, "Environment", state_at=-1)


def _line(row: dict[str, Any], *cells: str) -> Line:
    word = str(row.get("verdict", ""))
    return Line((word, *cells), _STATES.get(word, "note"))
