"""The logits and the tokens, against the oracle on the candidate's own sequence."""

from __future__ import annotations

from day0check.checks.evidence import Answer, Evidence, answer, answer_from
from day0check.checks.propagated import OUTPUT_OPERATORS

QUESTION = "Do logits and next tokens agree with the oracle wherever its margin is larger than the noise?"


def judge(evidence: Evidence) -> Answer:
    if evidence.net is None:
        reason = evidence.net_reason or "the reference pass of this case was not run"
        return answer("logits", evidence, "not_run", reason)
    measures = tuple(m for m in evidence.net if m.operator in OUTPUT_OPERATORS)
    return answer_from("logits", measures, evidence, nothing="neither logits nor a freely chosen token was recorded")
