"""The recorder's own check: what was shown as the final state is what the candidate's logits came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from day0check.checks.evidence import Answer, Evidence, answer, answer_from
from day0check.types import Measure

QUESTION = "Do the final states that were captured give the logits that the candidate answered with?"
NAME = "capture"
LOGITS = "head.logits"
BETWEEN = ("residual.collapse.output", "norm.rms.final", LOGITS)  # taps between the state and the logits


def judge(evidence: Evidence) -> Answer:
    """A state that does not give the logits is the capture's fault only where the logits are right and what lies
    between passed its own replay: then no layer is accused, and nothing of what was captured can be believed."""
    if evidence.net is None:
        reason = evidence.net_reason or "the reference pass of this case was not run"
        return answer(NAME, evidence, "not_run", reason)
    if not evidence.capture:
        return answer(NAME, evidence, "passed", "no final state was captured that could contradict the logits")
    accused = sorted({m.operator for m in _between(evidence) if not m.passed})
    if accused and not all(m.passed for m in evidence.capture):
        text = f"the logits do not follow from the captured state, and {', '.join(accused)} is accused of it already"
        return answer(NAME, evidence, "not_run", text)
    found = answer_from(NAME, evidence.capture, evidence, nothing="")
    return replace(found, findings=tuple(replace(f, stack_layer="harness") for f in found.findings))


def _between(evidence: Evidence) -> Iterator[Measure]:
    """Measures of the operators between the state and the logits, and of the logits against the oracle."""
    yield from (m for m in evidence.measures if m.tap in BETWEEN)
    yield from (m for m in evidence.net or () if m.tap == LOGITS)
