"""The net: every tap that travels, against the oracle through the whole run."""

from __future__ import annotations

from day0check.checks.evidence import Answer, Evidence, answer, answer_from

QUESTION = (
    "Do errors and choices stay within the noise of the claimed profile from layer to layer through the whole run?"
)
OUTPUT_OPERATORS = ("head.logits", "sample.token")


def judge(evidence: Evidence) -> Answer:
    if evidence.net is None:
        reason = evidence.net_reason or "the reference pass of this case was not run"
        return answer("propagated", evidence, "not_run", reason)
    measures = tuple(m for m in evidence.net if m.operator not in OUTPUT_OPERATORS)
    return answer_from("propagated", measures, evidence, nothing="the candidate recorded no tap that travels")
