"""Charts as inline SVG, byte-identical for the same rows: fixed hash salts, no date, text as text."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Sequence
from typing import Any

from markupsafe import escape

INK, LIGHT, BAND, CANDIDATE, FAILED = "#1b2733", "#8a97a3", "#cfe0f0", "#0b5394", "#a61b1b"
_PHASE_MARKS = {"prefill": ("o", "-"), "decode": ("s", "--")}
_FLOOR = 1e-12  # of a logarithmic axis: an error of exactly zero is drawn here


def drift_chart(case: str, rows: Sequence[dict[str, Any]], *, limit: float = 1.1) -> str:
    """Error against the oracle by layer, with the band that the claimed roundings alone may fill: noise times the row's
    own limit, or `limit` where it has none.

    `rows`: of one case, as in `Verdict.drift`. Returns one <svg> element with a title for screen readers, or "" when
    there is nothing to draw.
    """
    rows = [r for r in rows if isinstance(r.get("relative_l2"), (int, float))]
    if not rows:
        return ""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(svg_settings(case)):
        figure = Figure(figsize=(7.2, 3.0), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for phase in sorted({r["phase"] for r in rows}, reverse=True):
            _draw_phase(axes, [r for r in rows if r["phase"] == phase], phase, limit)
        _dress(axes, rows)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    return inline_svg(out.getvalue(), f"Error by layer of case {case}")


def _draw_phase(axes: Any, rows: Sequence[dict[str, Any]], phase: str, limit: float) -> None:
    marker, line = _PHASE_MARKS.get(phase, ("^", ":"))
    layers = [r["layer"] for r in rows]
    noisy = [r for r in rows if isinstance(r.get("noise_relative_l2"), (int, float))]
    if noisy:
        top = [max(r["noise_relative_l2"] * (r.get("whole_limit") or limit), _FLOOR) for r in noisy]
        axes.fill_between([r["layer"] for r in noisy], _FLOOR, top, color=BAND, alpha=0.55, linewidth=0)
        axes.plot([r["layer"] for r in noisy], top, line, color=LIGHT, linewidth=1, label=f"limit of noise, {phase}")
    errors = [max(r["relative_l2"], _FLOOR) for r in rows]
    axes.plot(layers, errors, line, marker=marker, color=CANDIDATE, markersize=4, label=f"candidate, {phase}")
    bad = [(r["layer"], max(r["relative_l2"], _FLOOR)) for r in rows if not r.get("passed", True)]
    if bad:
        axes.plot(*zip(*bad, strict=True), "X", color=FAILED, markersize=9, label=f"beyond its limit, {phase}")


def _dress(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    values = [v for r in rows for v in (r["relative_l2"], r.get("noise_relative_l2")) if isinstance(v, (int, float))]
    positive = [v for v in values if v > _FLOOR]
    axes.set_yscale("log")
    axes.set_ylim(min(positive, default=_FLOOR) / 3, max(positive, default=1.0) * 3)
    axes.set_xlabel("decoder layer", color=INK)
    axes.set_ylabel("relative error (L2)", color=INK)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(True, which="major", color="#e3e8ee", linewidth=0.7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.legend(fontsize=8, frameon=False, loc="best")


def svg_settings(name: str) -> dict[str, str]:
    """Matplotlib's settings for a chart that is the same bytes whenever it is drawn."""
    salt = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()
    return {"svg.fonttype": "none", "svg.hashsalt": salt, "font.family": "sans-serif"}


def inline_svg(svg: str, title: str) -> str:
    """Only the <svg> element, sized by the page, with ids that no other chart of the page shares."""
    body = svg[svg.index("<svg") :].rstrip()
    body = re.sub(r'^(<svg[^>]*?) width="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'^(<svg[^>]*?) height="[^"]*"', r"\1", body, count=1)
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    name = "chart" + hashlib.sha256(title.encode("utf-8", "replace")).hexdigest()[:8]
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'(xlink:href="|url\()#', rf"\g<1>#{name}-", body)
    return body.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
