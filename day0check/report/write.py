"""Writes the views of a verdict beside it. `verdict.json` is written first, by the gate; a view that cannot be made
never costs the verdict.
"""

from __future__ import annotations

import os
from pathlib import Path

from day0check.gate import render, write_text
from day0check.report import html, junit, markdown, tables
from day0check.types import Verdict

STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


def write_views(verdict: Verdict, folder: Path) -> tuple[Path, ...]:
    """report.html, junit.xml, summary.md and tables/*.csv in `folder`. Returns what was written."""
    texts = {
        "report.html": html.page(verdict, raw=render(verdict)),
        "junit.xml": junit.document(verdict),
        "summary.md": markdown.summary(verdict),
        **{f"tables/{name}": text for name, text in tables.csv_texts(verdict).items()},
    }
    paths = []
    for name, text in texts.items():
        write_text(folder / name, text)
        paths.append(folder / name)
    return tuple(paths)


def append_step_summary(verdict: Verdict) -> None:
    """Appends the Markdown summary to the file that GITHUB_STEP_SUMMARY names, when it is set."""
    target = os.environ.get(STEP_SUMMARY)
    if target:
        with Path(target).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(markdown.summary(verdict))
