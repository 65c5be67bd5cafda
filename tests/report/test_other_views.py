"""JUnit, Markdown, CSV and the terminal: what each must say, and what no text of a run may do to them."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import report_samples as samples
from junitparser import JUnitXml

from day0check.gate import Scene, decide
from day0check.report import junit, markdown, tables, words
from day0check.report.console import console, show
from day0check.report.write import append_step_summary, write_views
from day0check.types import CheckOutcome, NotRun


def test_junit_has_a_test_for_each_check_and_counts_them() -> None:
    """Would catch a CI that shows green for a failed check."""
    xml = JUnitXml.fromstring(junit.document(samples.not_ready()).encode())
    (suite,) = list(xml)
    assert (suite.tests, suite.failures, suite.skipped, suite.errors) == (7, 2, 1, 0)
    (choose,) = [c for c in suite if (c.name, c.classname) == ("choose", "text/one_turn") and not c.is_passed]
    assert "selects the future" in choose.result[0].message


def test_junit_of_an_inconclusive_run_is_not_green() -> None:
    """Would catch a CI that reads only JUnit and takes "skipped" for "ready"."""
    verdict = decide((CheckOutcome("logits", "not_run", "text/a", "no reference"),), (), Scene({}, "bf16", ("text/a",)))
    (suite,) = list(JUnitXml.fromstring(junit.document(verdict).encode()))
    assert (suite.failures, suite.skipped) == (1, 1)


def test_junit_carries_hostile_text() -> None:
    """Would catch a control character or a surrogate that makes the file no XML."""
    root = ElementTree.fromstring(junit.document(samples.hostile()))
    assert any("<script>alert(1)</script>" in (c.get("classname") or "") for c in root.iter("testcase"))


def test_markdown_puts_failures_first_and_escapes() -> None:
    """Would catch a table that a pipe breaks, markup from a run, and failures hidden in a fold."""
    text = markdown.summary(samples.not_ready())
    assert text.index("NOT READY") < text.index("### Findings") < text.index("<details>")
    hostile = markdown.summary(samples.hostile())
    assert "<script>" not in hostile
    rows = [line for line in hostile.splitlines() if line.startswith("| blocker")]
    assert len(rows) == 1
    assert len([c for c in rows[0].replace("\\|", "") if c == "|"]) == 4


def test_markdown_stays_below_what_ci_accepts() -> None:
    """Would catch a summary that is refused as a whole for its size, or is cut in the middle of a character."""
    many = tuple(CheckOutcome("compute", "failed", f"text/é{i}", "x" * 200) for i in range(8000))
    text = markdown.summary(replace(samples.not_ready(), checks=many))
    assert 800_000 < len(text.encode()) <= markdown.LARGEST_BYTES
    assert "report.html has it all" in text
    assert text.count("<details>") == text.count("</details>")


def test_the_step_summary_is_appended(tmp_path, monkeypatch) -> None:
    """Would catch a summary that overwrites those of earlier steps."""
    file = tmp_path / "summary.md"
    file.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(file))
    append_step_summary(samples.ready())
    assert file.read_text().startswith("before\n## ")


def test_csv_tables_come_back_and_run_no_formula() -> None:
    """Would catch a lost column, and a cell that a spreadsheet would execute."""
    texts = tables.csv_texts(samples.not_ready())
    rows = list(csv.DictReader(io.StringIO(texts["operators.csv"])))
    assert rows[0]["operator"] == "norm.rms"
    assert float(rows[0]["worst.row"]) == 1.07
    assert set(texts) == {f"{n}.csv" for n in ("findings", "checks", "not_run", "drift", "choices", "operators")}
    assert tables.safe("=HYPERLINK(1)") == "'=HYPERLINK(1)"
    assert tables.safe(-1.5) == -1.5


def test_the_terminal_shows_failures_and_no_control_character() -> None:
    """Would catch an escape sequence of a run that reaches the terminal, and a verdict that is not shown."""
    out = io.StringIO()
    show(samples.hostile(), console(out))
    assert "\x1b" not in out.getvalue()
    out = io.StringIO()
    show(samples.not_ready(), console(out))
    text = " ".join(out.getvalue().split())
    assert "NOT READY" in text
    assert "4 of 6 checks passed" in text
    assert "[" in words.sentence(replace(samples.not_ready(), first_fault=samples.finding(message="[bold]x")))


def test_square_brackets_of_case_names_are_printed_as_they_are() -> None:
    """Would catch a matrix case `chunks[schedule.chunk=63]` that the terminal takes for a style."""
    out = io.StringIO()
    case = "text/chunks[schedule.chunk=63]"
    show(replace(samples.not_ready(), not_run=(NotRun(f"logits of {case}", "why"),)), console(out))
    assert case in out.getvalue().replace("\n", "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0, "0"), (1234567, "1,234,567"), (0.00012345, "0.0001234"), (math.nan, "not a number"),
     ("-Infinity", "-infinite"), (True, "yes"), ({}, "–"), ("", "–")],
)  # fmt: skip
def test_numbers_as_people_read_them(value: object, text: str) -> None:
    """Would catch a NaN shown as a figure, and zero shown as nothing."""
    assert words.number(value) == text


def test_the_sentence_of_each_status() -> None:
    """Would catch a comforting sentence over a run that proved nothing."""
    empty = decide((), (), Scene({}, "bf16", ()))
    assert "nothing can be said" in words.sentence(empty)
    left = decide((), (), Scene({}, "bf16", (), not_run=(NotRun("case text/a", "no budget"),)))
    assert words.sentence(left) == "1 check did not run. First: case text/a: no budget."
    failed = decide((CheckOutcome("compute", "failed", "a", "2 failed"),), (), Scene({}, "bf16", ("a",)))
    assert words.sentence(failed) == "Check compute failed: 2 failed."


def test_all_views_are_written(tmp_path) -> None:
    """Would catch a view that hostile text makes impossible to write."""
    names = {p.relative_to(tmp_path).as_posix() for p in write_views(samples.hostile(), tmp_path)}
    assert {"report.html", "junit.xml", "summary.md", "tables/findings.csv"} <= names
    assert not list(tmp_path.rglob("*.partial"))


def test_tables_hold_only_text_that_utf8_can_encode() -> None:
    """Would catch lone surrogates in a cell or a column's name: pandas with Arrow refuses the whole table."""
    texts = tables.csv_texts(samples.hostile())
    assert texts
    "".join(texts.values()).encode()
    assert tables._flat({"\ud800": {"a": "\udfff", "b": ["\ud800"]}}) == {
        "\\ud800.a": "\\udfff",
        "\\ud800.b": "\\ud800",
    }
