"""What the four checks on local replay share: results against the reference on the candidate's own inputs."""

from __future__ import annotations

from day0check.checks.evidence import Answer, Evidence, answer, answer_from
from day0check.types import Kind


def judge_kind(kind: Kind, evidence: Evidence) -> Answer:
    """The answer of the check named as `kind`, from the local measures of that kind."""
    if evidence.run.get("status") == "unavailable":
        return answer(kind, evidence, "not_run", f"the candidate could not run: {evidence.run.get('message', '')}")
    if evidence.capabilities and "taps" not in evidence.capabilities:
        return answer(kind, evidence, "not_run", "the backend does not show its operator calls (no capability 'taps')")
    measures = tuple(m for m in evidence.measures if m.kind == kind)
    return answer_from(kind, measures, evidence, nothing=f"no operator of kind {kind!r} was recorded")
