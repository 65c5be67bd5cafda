"""The part of the page on a service: its start, its load phase by phase, and requests beside each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from day0check.report import service_charts, words
from day0check.report.rows import Line, Table
from day0check.types import Verdict

KEYS = ("endpoint", "service")  # of `measured`: shown here and not among times and memory
WARMUP = "warmup"


@dataclass(frozen=True)
class Service:
    """One endpoint. `charts`: (title, SVG)."""

    name: str
    sentence: str
    charts: tuple[tuple[str, str], ...]
    tables: tuple[Table, ...]


def services(verdict: Verdict) -> tuple[Service, ...]:
    """What was measured of each service of the verdict, in order of its name."""
    measured = verdict.measured
    found = {"endpoint": measured["endpoint"]} if isinstance(measured.get("endpoint"), Mapping) else {}
    found |= {str(k): v for k, v in (measured.get("service") or {}).items() if isinstance(v, Mapping)}
    return tuple(_service(name, figures) for name, figures in sorted(found.items()))


def _service(name: str, figures: Mapping[str, Any]) -> Service:
    load = dict(sorted((figures.get("load") or {}).items(), key=lambda named: _place(named[0])))
    phases = {k: p for k, p in load.items() if isinstance(p, Mapping) and k != WARMUP}
    charts = (
        ("Latency distributions", service_charts.latency_chart(name, phases)),
        ("Throughput against latency", service_charts.throughput_chart(name, phases)),
        ("Timeline", service_charts.timeline_chart(name, phases)),
    )
    tables = (_start(figures), _phases(load), _client(load), _exercised(figures), _interference(figures))
    tables += (_counters(figures),)
    return Service(
        name,
        f"{words.count(int(figures.get('requests', 0)), 'request')} asked one by one or in groups, "
        f"{words.count(int(figures.get('most_in_flight', 0)), 'request')} in flight at the most.",
        tuple((title, svg) for title, svg in charts if svg),
        tuple(t for t in tables if t.rows),
    )


def _place(phase: str) -> tuple[bool, str, int]:
    """Where a phase of a load stands among the others: a verdict that was read from its file has lost their order."""
    kind, _, more = phase.partition("/")
    return phase != WARMUP, kind, int(more) if more.isdecimal() else 0


def _start(figures: Mapping[str, Any]) -> Table:
    start = figures.get("start") or {}
    lines = [(f"step: {step}", s) for step, s in (start.get("steps") or {}).items()]
    lines += [(f"until {what}", start[what]) for what in ("listening", "ready") if what in start]
    lines += [("to stop", start["stopping"])] if "stopping" in start else []
    return Table(
        ("start", "seconds"), tuple(Line((n, words.number(s))) for n, s in lines), "Start and end", state_at=-1
    )


def _phases(load: Mapping[str, Any]) -> Table:
    head = (
        *("phase", "requests", "failed", "first token, ms", "p90", "p99", "per token, ms", "TPOT, ms", "whole, ms"),
        *("tokens/s", "requests/s", "objectives met", "note"),
    )
    lines = []
    for name, p in load.items():
        ttft, slo = p.get("ttft_ms", {}), p.get("slo")
        cells = (
            name,
            words.number(p.get("requests")),
            words.number(p.get("failed")),
            *(_short(ttft.get(q)) for q in ("p50", "p90", "p99")),
            *(_short(p.get(k, {}).get("p50")) for k in ("itl_ms", "tpot_ms", "e2e_ms")),
            *(_short(p.get(k)) for k in ("output_tokens_per_s", "requests_per_s")),
            f"{slo['share']:.1%}, {_short(slo['goodput_requests_per_s'])}/s" if slo else "–",
            _note(p),
        )
        unjudged = p.get("client_bound") or (p.get("failed") and p["failed"] == p.get("busy"))
        lines.append(Line(cells, "not_run" if unjudged else "failed" if p.get("failed") else ""))
    return Table(head, tuple(lines), "Load: medians where nothing else is said", state_at=0)


def _note(phase: Mapping[str, Any]) -> str:
    if phase.get("failed"):
        return "more than it takes" if phase["failed"] == phase.get("busy") else "requests failed"
    return "client too slow" if phase.get("client_bound") else "saturated" if phase.get("saturated") else "–"


def _client(load: Mapping[str, Any]) -> Table:
    """What the measuring itself cost: figures of a client at its limit are its own and not the endpoint's."""
    head = ("phase", "CPU of one core", "CPU µs/token", "sent late by, ms, p90", "read late by, ms, p90", "verdict")
    lines = []
    for name, p in load.items():
        own = p.get("client", {})
        share = own.get("cpu_share")
        cells = (
            name,
            "–" if share is None else f"{share:.1%}",
            _short(own.get("cpu_us_per_token")),
            *(_short(own.get(k, {}).get("p90")) for k in ("dispatch_lag_ms", "loop_lag_ms")),
            p.get("client_bound") or "fast enough",
        )
        lines.append(Line(cells, "not_run" if p.get("client_bound") else ""))
    return Table(head, tuple(lines), "The client that measured", state_at=0)


def _short(value: Any) -> str:
    """Three digits: what a figure of a load is good for."""
    return "–" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _count(value: Any) -> str:
    """A counter: whole where it counts things, short where it is a share."""
    return words.number(int(value) if isinstance(value, float) and value.is_integer() else value)


def _interference(figures: Mapping[str, Any]) -> Table:
    """Every prompt beside others against itself alone, with the noise of its own repeat beside it."""
    lines = []
    for row in figures.get("interference") or ():
        same = row.get("same_text")
        cells = (
            "same" if same else "differs",
            str(row.get("label", "")),
            words.number(row.get("token")),
            words.number(row.get("margin")),
            words.number(row.get("delta_logprob")),
            words.number(row.get("repeat_delta_logprob")),
            "same" if row.get("repeat_same_text") else "differs",
        )
        lines.append(Line(cells, "passed" if same else "note"))
    head = ("text", "request", "from token", "margin there", "|Δ log-prob.|", "of its repeat", "repeat")
    return Table(head, tuple(lines), "Beside others against alone")


def _exercised(figures: Mapping[str, Any]) -> Table:
    """Which paths the questions about interference really took, and what proves it."""
    lines = tuple(
        Line(
            ("exercised" if row.get("exercised") else "not exercised", str(row.get("path")), str(row.get("proof"))),
            "passed" if row.get("exercised") else "not_run",
        )
        for row in figures.get("exercised") or ()
    )
    return Table(("state", "path", "what shows it"), lines, "What was exercised")


def _counters(figures: Mapping[str, Any]) -> Table:
    counted = figures.get("counters")
    rows = [row for row in counted if row.get("values")] if isinstance(counted, (list, tuple)) else []
    names = sorted({name for row in rows for name in row["values"]})
    lines = tuple(Line((row["moment"], *(_count(row["values"].get(name)) for name in names))) for row in rows)
    return Table(("moment", *(n.replace("_", " ") for n in names)), lines, "Its own counters", state_at=-1)
