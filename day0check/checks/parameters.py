"""The weights and settings in use, against the checkpoint: no operator can be right with those of another model."""

from __future__ import annotations

from day0check.checks.evidence import Answer, Evidence, answer, answer_from

QUESTION = "Are the weights and settings in use those of the checkpoint?"
NAME = "parameters"


def judge(evidence: Evidence) -> Answer:
    if evidence.run.get("status") == "unavailable":
        return answer(NAME, evidence, "not_run", f"the candidate could not run: {evidence.run.get('message', '')}")
    if evidence.capabilities and "taps" not in evidence.capabilities:
        return answer(NAME, evidence, "not_run", "the backend does not show its operator calls (no capability 'taps')")
    if evidence.parameters is None:
        reason = evidence.net_reason or "the candidate's weights and settings were not recorded"
        return answer(NAME, evidence, "not_run", reason)
    return answer_from(NAME, evidence.parameters, evidence, nothing="no weight and no setting was recorded")
