"""The net: every tap that travels, against the oracle through the whole run."""

from __future__ import annotations

from dataclasses import replace

from day0check.checks.evidence import Answer, Evidence, answer, answer_from
from day0check.types import Finding

QUESTION = (
    "Do errors and choices stay within the noise of the claimed profile from layer to layer through the whole run?"
)
OUTPUT_OPERATORS = ("head.logits", "sample.token")


def judge(evidence: Evidence) -> Answer:
    if evidence.net is None:
        reason = evidence.net_reason or "the reference pass of this case was not run"
        return answer("propagated", evidence, "not_run", reason)
    measures = tuple(m for m in evidence.net if m.operator not in OUTPUT_OPERATORS)
    found = answer_from("propagated", measures, evidence, nothing="the candidate recorded no tap that travels")
    return replace(found, findings=consequences_apart(found.findings))


def consequences_apart(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Findings of the net in order of execution, those after the first call that is wrong lowered to warnings.

    An error travels: what lies behind the first wrong tap is wrong with it, and accuses nobody.
    """
    if not findings:
        return findings
    first = findings[0]
    return tuple(
        f
        if f.evidence["order"] == first.evidence["order"]
        else replace(f, severity="warning", evidence={**f.evidence, "consequence_of": first.id})
        for f in findings
    )
