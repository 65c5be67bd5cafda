"""The logits and the tokens, against the oracle on the candidate's own sequence."""

from __future__ import annotations

from dataclasses import replace

from day0check.checks.evidence import Answer, Evidence, answer, answer_from
from day0check.checks.propagated import OUTPUT_OPERATORS

MATCHED = ".matched"  # of what the matched filter says of a black box that it accuses of nothing
QUESTION = "Do logits and next tokens agree with the oracle wherever its margin is larger than the noise?"


def judge(evidence: Evidence) -> Answer:
    if evidence.net is None:
        reason = evidence.net_reason or "the reference pass of this case was not run"
        return answer("logits", evidence, "not_run", reason)
    measures = tuple(m for m in evidence.net if m.operator in OUTPUT_OPERATORS)
    found = answer_from("logits", measures, evidence, nothing="neither logits nor a freely chosen token was recorded")
    told = next((m.message for m in measures if m.tap.endswith(MATCHED) and m.passed), "")
    if found.outcome.status != "passed" or not told:
        return found
    return replace(found, outcome=replace(found.outcome, summary=f"{found.outcome.summary}; {told}"))
