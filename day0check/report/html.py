"""`report.html`: one offline file. No request leaves it, it reads without JavaScript, and every text is escaped."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import day0check
from day0check.report import charts, words
from day0check.report.comparison import baseline_section
from day0check.report.rows import (
    check_matrix,
    check_table,
    choice_table,
    measured_pairs,
    not_run_table,
    operator_table,
    split,
)
from day0check.report.service import services
from day0check.types import Finding, Verdict, to_json

_TEMPLATES = Path(__file__).parent / "templates"
_SIGNS = {"ready": "✓", "not_ready": "✗", "inconclusive": "?", "error": "!"}
_FINDING_STATES = {"blocker": "failed", "warning": "not_run", "note": "note"}


@dataclass(frozen=True)
class _Finding:
    anchor: str
    state: str
    word: str
    message: str
    pairs: tuple[tuple[str, str], ...]
    evidence: str


@dataclass(frozen=True)
class _Chart:
    title: str
    svg: Any  # Markup: made by matplotlib from numbers, never from a text of the verdict but its escaped label


def page(verdict: Verdict, *, raw: str) -> str:
    """The whole page. `raw` is the text of verdict.json, shown at the end."""
    return _environment().get_template("report.html.j2").render(p=_view(verdict, raw))


@functools.cache
def _environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _view(verdict: Verdict, raw: str) -> dict[str, Any]:
    from markupsafe import Markup

    findings = tuple(
        _finding(f, i) for i, f in enumerate(words.findings_in_order(verdict.findings, first=verdict.first_fault))
    )
    baseline = baseline_section(verdict)
    measured = measured_pairs(verdict)
    served = services(verdict)
    first = verdict.first_fault
    return {
        "status": verdict.status,
        "sign": _SIGNS[verdict.status],
        "word": words.status_word(verdict),
        "sentence": words.sentence(verdict),
        "address": words.address(first) if first else "",
        "model": str(verdict.model.get("name", "")),
        "profile": verdict.profile,
        "facts": facts(verdict),
        "sections": _sections(bool(findings), baseline is not None, bool(measured), bool(served)),
        "blockers": [f for f in findings if f.state == "failed"],
        "lesser": [f for f in findings if f.state != "failed"],
        "matrix": check_matrix(verdict),
        "checks": split(check_table(verdict)),
        "check_counts": check_counts(verdict),
        "not_run": not_run_table(verdict),
        "baseline": baseline,
        "charts": tuple(_Chart(title, Markup(svg)) for title, svg in _charts(verdict)),
        "choices": split(choice_table(verdict)),
        "operators": operator_table(verdict),
        "services": [(s, [_Chart(title, Markup(svg)) for title, svg in s.charts]) for s in served],
        "measured": measured,
        "environment": words.pairs(to_json(verdict.environment)),
        "raw": raw,
        "version": day0check.__version__,
        "schema_version": verdict.schema_version,
        # Our own two files: shipped with the package, they hold no text of any run.
        "css": Markup((_TEMPLATES / "report.css").read_text(encoding="utf-8")),
        "script": Markup((_TEMPLATES / "report.js").read_text(encoding="utf-8")),
    }


def facts(verdict: Verdict) -> list[tuple[str, str]]:
    """What stands under the banner: model, profile, backend, device, cases, and every thing that widens trust."""
    model, environment = verdict.model, verdict.environment
    lines = [
        ("model", str(model.get("name", "–"))),
        ("profile", verdict.profile),
        ("backend", str(model.get("backend", "–"))),
        ("device", str(model.get("device", "–"))),
        ("cases", f"{len(verdict.cases):,}"),
    ]
    if model.get("ops"):
        ops = model["ops"]
        lines.append(("operators file", str(ops.get("file", "–")) if isinstance(ops, dict) else str(ops)))
    if fused := words.fused(verdict):
        lines.append(("run as one", fused))
    code = environment.get("code")
    if isinstance(code, dict) and code.get("commit"):
        lines.append(("commit", str(code["commit"])[:12] + (" with changes" if code.get("dirty") else "")))
    return lines


def check_counts(verdict: Verdict) -> str:
    by = {s: sum(c.status == s for c in verdict.checks) for s in words.CHECK_WORDS}
    parts = [f"{n:,} {words.CHECK_WORDS[s]}" for s, n in by.items() if n]
    return f"{words.count(len(verdict.checks), 'answer')}: {', '.join(parts)}." if parts else ""


def _finding(finding: Finding, index: int) -> _Finding:
    state = "note" if finding.waived else _FINDING_STATES[finding.severity]
    pairs = [
        ("id", finding.id),
        ("check", finding.check),
        ("address", words.address(finding)),
        ("value", words.number(finding.value)),
        ("limit", words.number(finding.limit)),
        ("power", words.number(finding.power)),
        ("layer of the stack", finding.stack_layer),
    ]
    evidence = json.dumps(to_json(finding.evidence), sort_keys=True, indent=1, ensure_ascii=False)
    return _Finding(
        anchor=f"finding-{index + 1}",
        state=state,
        word=f"waived {finding.severity}" if finding.waived else finding.severity,
        message=finding.message,
        pairs=tuple((n, v) for n, v in pairs if v not in ("", "–")),
        evidence=evidence if finding.evidence else "",
    )


def _sections(findings: bool, baseline: bool, measured: bool, served: bool) -> list[tuple[str, str]]:
    every = [
        ("findings", "Findings", findings),
        ("checks", "Checks", True),
        ("not-run", "Not run", True),
        ("baseline", "Baseline", baseline),
        ("services", "Service", served),
        ("drift", "Error by layer", True),
        ("choices", "Choices", True),
        ("operators", "Operators", True),
        ("measured", "Time and memory", measured),
        ("environment", "Environment", True),
        ("raw", "Raw data", True),
    ]
    return [(i, title) for i, title, shown in every if shown]


def _charts(verdict: Verdict) -> Sequence[tuple[str, str]]:
    """One chart a case, the one nearest to its limit first."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in verdict.drift:
        by_case.setdefault(str(row.get("case", "")), []).append(row)

    def nearness(case: str) -> float:
        ratios = (r["whole"] for r in by_case[case] if isinstance(r.get("whole"), (int, float)))
        return max(ratios, default=0.0)

    drawn = ((case, charts.drift_chart(case, by_case[case])) for case in sorted(by_case, key=nearness, reverse=True))
    return [(case, svg) for case, svg in drawn if svg]
