"""What a person reads on the terminal: the verdict, its sentence, the table of checks with failures first."""

from __future__ import annotations

from typing import IO

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from day0check.report import words
from day0check.report.comparison import baseline_section
from day0check.report.rows import check_table
from day0check.types import Verdict

_COLOURS = {"ready": "green", "not_ready": "red", "inconclusive": "yellow", "error": "magenta"}
_CHECK_COLOURS = {"failed": "red", "not_run": "yellow", "passed": "green", "note": "blue", "": ""}
MOST_FINDINGS = 10
MOST_PASSED = 0  # passed checks are counted, not listed


def console(file: IO[str] | None = None) -> Console:
    """A console on `file` (stderr by default): colours and widths only on a terminal, NO_COLOR honoured."""
    return Console(file=file, stderr=file is None, highlight=False, soft_wrap=False)


def show(verdict: Verdict, out: Console, *, folder: str = "") -> None:
    """Prints the verdict. Texts of the run are printed as text: no markup in them is followed."""
    colour = _COLOURS[verdict.status]
    body = Text(_printable(words.sentence(verdict)))
    if verdict.first_fault is not None:
        body.append("\n" + _printable(words.address(verdict.first_fault)), style="dim")
    out.print(Panel(body, title=Text(words.status_word(verdict), style=f"bold {colour}"), border_style=colour))
    _findings(verdict, out)
    _checks(verdict, out)
    section = baseline_section(verdict)
    if section is not None:
        out.print(Text(_printable(section.sentence)))
        for change in verdict.measured["baseline"].get("environment_changes", ()):
            out.print(Text(f"  changed since: {_printable(str(change))}"))
    for item in verdict.not_run[:MOST_FINDINGS]:
        out.print(Text(f"not run: {_printable(item.check)}: {_printable(item.reason)}", style="yellow"))
    if len(verdict.not_run) > MOST_FINDINGS:
        out.print(Text(f"not run: {len(verdict.not_run) - MOST_FINDINGS} more, see report.html", style="yellow"))
    if folder:
        out.print(Text(f"everything of this run: {folder}", style="dim"))


def _findings(verdict: Verdict, out: Console) -> None:
    findings = words.findings_in_order(verdict.findings, first=verdict.first_fault)
    for f in findings[:MOST_FINDINGS]:
        style = {"blocker": "red", "warning": "yellow", "note": "blue"}[f.severity]
        word = f"waived {f.severity}" if f.waived else f.severity
        out.print(Text(word, style="dim" if f.waived else style), Text(f"{f.id} {_printable(f.message)}"))
    if len(findings) > MOST_FINDINGS:
        out.print(Text(f"{len(findings) - MOST_FINDINGS} more findings, see report.html"))


def _checks(verdict: Verdict, out: Console) -> None:
    lines = [line for line in check_table(verdict).rows if line.state != "passed"]
    passed = sum(c.status == "passed" for c in verdict.checks)
    if lines:
        table = Table("status", "check", "case", "in short", box=None, pad_edge=False)
        for line in lines:
            first, *rest = line.cells
            table.add_row(Text(first, style=_CHECK_COLOURS[line.state]), *(Text(_printable(c)) for c in rest))
        out.print(table)
    out.print(Text(f"{passed} of {words.count(len(verdict.checks), 'check')} passed", style="dim"))


def _printable(text: str) -> str:
    """No control character of a run's text reaches the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
