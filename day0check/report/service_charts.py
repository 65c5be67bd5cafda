"""Charts of a service under load as inline SVG, byte-identical for the same figures."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from day0check.report.charts import CANDIDATE, INK, LIGHT, inline_svg, svg_settings

COLOURS = ("#0b5394", "#b45f06", "#38761d", "#741b47", "#45818e", "#7f6000")
LINES = ("-", "--", "-.", ":")  # so that the phases can be told apart without colour, too
Phases = Mapping[str, Mapping[str, Any]]


def latency_chart(name: str, phases: Phases) -> str:
    """Distributions of time to first token, time per token and whole answer: share of requests by milliseconds.

    `phases`: figures by phase, with `curves` of quantiles from 0 to 100 % in equal steps. Returns one <svg>, "" when
    there is nothing to draw.
    """
    parts = [("ttft_ms", "first token"), ("itl_ms", "per token"), ("e2e_ms", "whole answer")]
    shown = [(key, title) for key, title in parts if any(_curve(p, key) for p in phases.values())]
    if not shown:
        return ""

    def draw(figure: Any) -> None:
        for place, (key, title) in enumerate(shown, 1):
            axes = figure.add_subplot(1, len(shown), place)
            for number, (phase, figures) in enumerate(phases.items()):
                curve = _curve(figures, key)
                if curve:
                    share = [100 * i / (len(curve) - 1) for i in range(len(curve))]
                    axes.plot(curve, share, LINES[number % 4], color=COLOURS[number % 6], label=phase)
            axes.set_title(title, fontsize=9, color=INK)
            axes.set_xlabel("ms", color=INK)
            axes.set_xlim(left=0)
            _dress(axes)
            if place == 1:
                axes.set_ylabel("% of requests", color=INK)
                axes.legend(fontsize=7, frameon=False, loc="lower right")  # where a distribution has no points

    return _svg(f"Latency distributions of {name}", draw, height=2.8)


def throughput_chart(name: str, phases: Phases) -> str:
    """Output tokens per second against the time to the first token, a point for each number of concurrent requests."""
    points = sorted(
        (int(phase.rpartition("/")[2]), f["output_tokens_per_s"], f["ttft_ms"].get("p50"), f["ttft_ms"].get("p90"))
        for phase, f in phases.items()
        if phase.startswith("closed/") and f.get("ttft_ms", {}).get("p50") is not None
    )
    if not points:
        return ""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        rates = [rate for _, rate, _, _ in points]
        axes.plot(rates, [p50 for *_, p50, _ in points], "-o", color=CANDIDATE, markersize=4, label="median")
        if all(p90 is not None for *_, p90 in points):
            axes.plot(rates, [p90 for *_, p90 in points], "--s", color=LIGHT, markersize=3, label="nine of ten within")
        for concurrency, rate, p50, _ in points:
            axes.annotate(
                str(concurrency),
                (rate, p50),
                xytext=(0, -11),
                textcoords="offset points",
                fontsize=8,
                color=INK,
                ha="center",
            )
        axes.set_xlabel("output tokens per second", color=INK)
        axes.set_ylabel("first token, ms", color=INK)
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.legend(fontsize=8, frameon=False)
        _dress(axes)

    return _svg(f"Throughput against latency of {name}, points are concurrent requests", draw, height=2.6)


def timeline_chart(name: str, phases: Phases) -> str:
    """Requests in flight and output tokens per second over the seconds of the load, the phases one after the other."""
    begin, spans = 0.0, []
    for phase, figures in phases.items():
        line = figures.get("timeline")
        if line and line.get("in_flight"):
            spans.append((begin, phase, line))
            begin += line["step_s"] * len(line["in_flight"])
    if not spans:
        return ""

    def draw(figure: Any) -> None:
        upper, lower = figure.subplots(2, 1, sharex=True)
        for start, phase, line in spans:
            times = [start + line["step_s"] * i for i in range(len(line["in_flight"]) + 1)]
            for axes, key in ((upper, "in_flight"), (lower, "output_tokens_per_s")):
                axes.stairs(line[key], times, color=CANDIDATE, fill=True, alpha=0.35)
                axes.axvline(start, color=LIGHT, linewidth=0.7)
            upper.text(start, 1.02, phase, transform=upper.get_xaxis_transform(), fontsize=7, color=INK)
        upper.yaxis.get_major_locator().set_params(integer=True)
        upper.set_ylabel("in flight", color=INK)
        lower.set_ylabel("tokens per s", color=INK)
        lower.set_xlabel("seconds of load", color=INK)
        for axes in (upper, lower):
            axes.set_ylim(bottom=0)
            axes.set_xlim(0, begin)
            _dress(axes)

    return _svg(f"Timeline of {name}", draw, height=3.2)


def _curve(figures: Mapping[str, Any], key: str) -> Sequence[float]:
    return (figures.get("curves") or {}).get(key) or ()


def _dress(axes: Any) -> None:
    axes.grid(True, which="major", color="#e3e8ee", linewidth=0.7)
    axes.tick_params(labelsize=8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_size(9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _svg(title: str, draw: Callable[[Any], None], *, height: float) -> str:
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(svg_settings(title)):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return inline_svg(out.getvalue(), title)
