"""`junit.xml`: one test case per (case, check); a failure's text is the first finding, its numbers are properties."""

from __future__ import annotations

import re
from collections.abc import Sequence

from day0check.report import words
from day0check.types import CheckOutcome, Finding, Verdict

# XML 1.0 has no spelling for these characters, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def document(verdict: Verdict) -> str:
    """The XML text. Checks not run are `skipped`, except when nothing else says so: an inconclusive verdict carries one
    failing test `verdict`, so that a CI that reads only this file does not show green."""
    from junitparser import Error, Failure, JUnitXml, Properties, Property, Skipped, TestCase, TestSuite

    suite = TestSuite("day0check")
    for name, value in (("status", verdict.status), ("profile", verdict.profile), *_facts(verdict)):
        suite.add_property(clean(name), clean(value))
    for outcome in verdict.checks:
        test = TestCase(clean(outcome.name), classname=clean(outcome.case or "run"))
        own = _findings_of(outcome, verdict.findings)
        if outcome.status == "failed":
            text = "\n".join(f"[{f.id}] {f.message}" for f in own) or outcome.summary or "failed"
            waived = bool(own) and all(f.waived for f in own if f.severity == "blocker")
            test.result = [Skipped(clean(f"waived: {text}")) if waived else _failure(Failure, text)]
        elif outcome.status == "not_run":
            test.result = [Skipped(clean(outcome.summary or "not run"))]
        if own:
            properties = Properties()
            for name, text in _address_and_figures(own[0]):
                properties.add_property(Property(name, clean(text)))
            test.append(properties)
        suite.add_testcase(test)
    verdict_test = TestCase("verdict", classname="day0check")
    if verdict.status == "error":
        verdict_test.result = [_failure(Error, words.sentence(verdict))]
    elif verdict.status != "ready":
        verdict_test.result = [_failure(Failure, words.sentence(verdict))]
    suite.add_testcase(verdict_test)
    xml = JUnitXml("day0check")
    xml.add_testsuite(suite)
    xml.update_statistics()
    return '<?xml version="1.0" encoding="utf-8"?>\n' + xml.tostring().decode("utf-8") + "\n"


def clean(text: object) -> str:
    """Text with every character that XML cannot carry replaced."""
    return _NOT_XML.sub("\ufffd", str(text))


def _failure(kind: type, text: str) -> object:
    result = kind(clean(text.splitlines()[0] if text else ""))
    result.text = clean(text)
    return result


def _facts(verdict: Verdict) -> Sequence[tuple[str, str]]:
    return [(k, str(v)) for k, v in sorted(verdict.model.items()) if isinstance(v, (str, int, float))]


def _address_and_figures(finding: Finding) -> list[tuple[str, str]]:
    names = ("id", "operator", "layer", "phase", "request", "position", "value", "limit", "power")
    values = ((name, getattr(finding, name)) for name in names)
    return [(n, words.number(v) if isinstance(v, float) else str(v)) for n, v in values if v is not None]


def _findings_of(outcome: CheckOutcome, findings: Sequence[Finding]) -> list[Finding]:
    def of_case(f: Finding) -> bool:
        case = f.evidence.get("case")
        if case is not None:
            return case == outcome.case
        return f.request is None or not outcome.case or f.request.startswith(f"{outcome.case}/")

    return words.findings_in_order([f for f in findings if f.check == outcome.name and of_case(f)])
