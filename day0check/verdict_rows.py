"""The tables of a verdict, made from measures: drift by layer, choices by tap, the worst statistics of each operator.

Pure functions; nothing here decides anything. `local` are the lines of a case's measures.jsonl, `net` those of its
net.jsonl; of several lines for one (tap, phase) the last counts, as the judge writes failures at once and totals later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from day0check.types import Measure

WEAK = 0.01  # an operator whose judgements are blind to a smaller relative error than this is weakly judged
Row = dict[str, Any]
Measures = Mapping[str, Sequence[Measure]]  # case id -> measures


def last_of_each(measures: Iterable[Measure]) -> tuple[Measure, ...]:
    """One measure per (tap, phase), the last written, in order of execution."""
    latest = {(m.tap, m.phase): m for m in measures}
    return tuple(sorted(latest.values(), key=lambda m: (m.order, m.tap, m.phase)))


def drift_rows(net: Measures) -> tuple[Row, ...]:
    """One row per (case, layer, phase): the error of the layer's last compared tap against the oracle, beside the
    error that the claimed roundings alone make there. Layers without such a tap have no row."""
    rows: list[Row] = []
    for case, measures in net.items():
        last: dict[tuple[int, str], Measure] = {}
        for m in last_of_each(measures):
            if m.layer is not None and "relative_l2" in m.statistics:
                last[(m.layer, m.phase)] = m
        for (layer, phase), m in sorted(last.items()):
            rows.append(
                {
                    "case": case,
                    "layer": layer,
                    "phase": phase,
                    "tap": m.tap,
                    "relative_l2": m.statistics["relative_l2"],
                    "noise_relative_l2": m.statistics.get("noise_relative_l2"),
                    "whole": m.statistics.get("whole"),
                    "whole_limit": m.limits.get("whole"),
                    "passed": m.passed,
                }
            )
    return tuple(rows)


def choice_rows(local: Measures, net: Measures) -> tuple[Row, ...]:
    """One row per (tap, phase, seen): every selection and routing, worst case first to fail, sums over cases."""
    rows: dict[tuple[str, str, str], Row] = {}
    for seen, by_case in (("local", local), ("net", net)):
        for case, measures in by_case.items():
            for m in last_of_each(measures):
                if m.kind == "choose":
                    key = (m.tap, m.phase, seen)
                    rows[key] = _join_choice(rows.get(key), _choice(m, case, seen))
    return tuple(rows[key] for key in sorted(rows))


def _choice(m: Measure, case: str, seen: str) -> Row:
    return {
        "tap": m.tap,
        "operator": m.operator,
        "layer": m.layer,
        "phase": m.phase,
        "seen": seen,
        "rows": m.rows,
        "passed": m.passed,
        "case": case,
        "pattern": m.pattern,
        "statistics": dict(m.statistics),
        "limits": dict(m.limits),
    }


def _join_choice(old: Row | None, new: Row) -> Row:
    if old is None:
        return new
    lead = old if not old["passed"] or new["passed"] else new
    return {
        **lead,
        "rows": old["rows"] + new["rows"],
        "passed": old["passed"] and new["passed"],
        "statistics": _worst(old["statistics"], new["statistics"]),
        "limits": {**new["limits"], **old["limits"]},
    }


def operator_rows(local: Measures) -> tuple[Row, ...]:
    """One row per operator: how much was judged, the worst of each statistic with its limit, and the power: the
    smallest error that every one of its judgements could have seen; above WEAK it is weakly judged, and `note` says so,
    or that a tighter claim would hold."""
    rows: dict[str, Row] = {}
    for case, measures in local.items():
        for m in last_of_each(measures):
            row = rows.setdefault(m.operator, _operator(m))
            row["taps"] += 1
            row["rows"] += m.rows
            row["elements"] += m.elements
            row["failed"] += not m.passed and not m.not_judged
            row["not_judged"] += bool(m.not_judged)
            row["power"] = _larger(row["power"], m.power)
            row["note"] = row["note"] or (m.message if m.passed else "")
            _take_worst(row, m, case)
    for row in rows.values():
        row["weak"] = row["power"] is not None and row["power"] > WEAK
        if row["weak"]:
            row["note"] = "; ".join(filter(None, (f"weakly judged: blind below {row['power']:.1%}", row["note"])))
    return tuple(sorted(rows.values(), key=lambda r: (-r["failed"], -(r["used"] or 0.0), r["operator"])))


def _operator(m: Measure) -> Row:
    return {
        "operator": m.operator,
        "kind": m.kind,
        "taps": 0,
        "rows": 0,
        "elements": 0,
        "failed": 0,
        "not_judged": 0,
        "power": None,
        "used": None,  # the largest statistic / limit of all, 1 = at the limit
        "statistic": "",  # which one that was, where
        "tap": "",
        "phase": "",
        "case": "",
        "worst": {},
        "limits": {},
        "weak": False,
        "note": "",
    }


def _take_worst(row: Row, m: Measure, case: str) -> None:
    for name, value in m.statistics.items():
        limit = m.limits.get(name)
        part = used(value, limit)
        if part is None:
            continue
        kept = used(row["worst"].get(name), row["limits"].get(name))
        if kept is None or _above(part, kept):
            row["worst"][name], row["limits"][name] = value, limit
        if row["used"] is None or _above(part, row["used"]):
            row.update(used=part, statistic=name, tap=m.tap, phase=m.phase, case=case)


def used(value: float | None, limit: float | None) -> float | None:
    """How much of its limit a statistic uses: value / limit; a limit of zero is used up by anything above zero."""
    if value is None or limit is None:
        return None
    if math.isnan(value):
        return math.inf
    if limit == 0:
        return math.inf if value > 0 else 0.0
    return value / limit


def _above(a: float, b: float) -> bool:
    return math.isnan(a) or a > b


def _larger(a: float | None, b: float | None) -> float | None:
    return b if a is None else a if b is None else max(a, b)


def _worst(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    return {k: max((d[k] for d in (a, b) if k in d), key=_size) for k in sorted({*a, *b})}


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value
