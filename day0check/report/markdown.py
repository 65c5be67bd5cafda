"""`summary.md`, also appended to the file that GITHUB_STEP_SUMMARY names: failures first, never above 900 kB."""

from __future__ import annotations

from day0check.report import words
from day0check.report.comparison import baseline_section
from day0check.report.rows import Table, check_table, not_run_table, operator_table
from day0check.types import Verdict

LARGEST_BYTES = 900_000
_SIGNS = {"ready": "✅", "not_ready": "❌", "inconclusive": "❔", "error": "⚠️"}


def summary(verdict: Verdict) -> str:
    """The page for a pull request. Cut at a line end, saying so, when it would grow beyond 900 kB."""
    first = verdict.first_fault
    lines = [
        f"## {_SIGNS[verdict.status]} day0check: {words.status_word(verdict)}",
        "",
        cell(words.sentence(verdict)),
        "",
    ]
    if first is not None:
        lines += [cell(words.address(first)), ""]
    facts = [f"model {verdict.model.get('name', '–')}", f"profile {verdict.profile}"]
    facts += [f"{key} {verdict.model[key]}" for key in ("backend", "device") if key in verdict.model]
    facts += [f"run as one: {fused}"] if (fused := words.fused(verdict)) else []
    lines += [cell(", ".join(facts)) + f", {words.count(len(verdict.cases), 'case')}.", ""]
    live = words.findings_in_order(verdict.findings, first=verdict.first_fault)
    if live:
        lines += ["### Findings", "", "| | id | message |", "|---|---|---|"]
        lines += [f"| {'waived ' if f.waived else ''}{f.severity} | `{f.id}` | {cell(f.message)} |" for f in live]
        lines.append("")
    checks = check_table(verdict)
    bad = Table(checks.head, tuple(r for r in checks.rows if r.state != "passed"), "Checks that failed or did not run")
    good = Table(checks.head, tuple(r for r in checks.rows if r.state == "passed"), "Checks that passed")
    lines += _table(bad) + _table(not_run_table(verdict))
    baseline = baseline_section(verdict)
    if baseline is not None:
        lines += ["### Against the baseline", "", cell(baseline.sentence), ""]
        for table in baseline.tables:
            lines += _folded(table)
    lines += _folded(good) + _folded(operator_table(verdict))
    return _cut(lines)


def cell(text: str) -> str:
    """A text inside a line or a table cell: no markup of its own survives."""
    text = " ".join(str(text).split())
    for sign in "\\`*_[]|#~$":
        text = text.replace(sign, "\\" + sign)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("@", "@\u200b")


def _table(table: Table) -> list[str]:
    return [f"### {table.title}", "", *_lines(table), ""] if table.rows else []


def _folded(table: Table) -> list[str]:
    if not table.rows:
        return []
    return [f"<details><summary>{table.title} ({len(table.rows)})</summary>", "", *_lines(table), "", "</details>", ""]


def _lines(table: Table) -> list[str]:
    head = "| " + " | ".join(table.head) + " |"
    rows = ["| " + " | ".join(cell(c) for c in line.cells) + " |" for line in table.rows]
    return [head, "|" + "---|" * len(table.head), *rows]


def _cut(lines: list[str]) -> str:
    note = "\n_The rest is left out here; report.html has it all._\n"
    kept, used, folded = [], len(note.encode()) + 64, False
    for line in lines:
        used += len(line.encode("utf-8", "replace")) + 1
        if used > LARGEST_BYTES:
            return "\n".join(kept) + ("\n\n</details>\n" if folded else "\n") + note
        folded = (folded or line.startswith("<details>")) and line != "</details>"
        kept.append(line)
    return "\n".join(kept).rstrip() + "\n"
