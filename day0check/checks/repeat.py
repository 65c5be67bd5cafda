"""The unobserved repeat of a case: observing must change nothing, and the same case must be answered the same twice."""

from __future__ import annotations

from day0check.checks.evidence import Answer, Evidence, answer
from day0check.types import Finding, Severity, finding_id

QUESTION = "Does the candidate give the same tokens and logits when it runs the case a second time, unobserved?"
NAME = "repeat"
LOGITS = "head.logits"
UNRELATED = 0.5  # relative difference of logits: a legal choice that falls otherwise moves a row by a fifth at most
NOISES = 30.0  # of the claimed precision: beyond it more than the order of sums differs


def judge(evidence: Evidence) -> Answer:
    """Logits that are not finite, or unrelated, in the unobserved run alone fail: what was observed is then not what
    runs. Other differences are told and pass: kernels may legally sum in another order from run to run, and a near
    tie then flips. They say that no figure of this case is reproducible to the bit, and that the observer itself may
    have mattered.
    """
    if not evidence.finished:
        return answer(NAME, evidence, "not_run", "the candidate did not finish the case")
    equal = evidence.run.get("repeat_equal")
    if equal is None:
        return answer(NAME, evidence, "not_run", "the case was run only once")
    figures = evidence.run.get("unobserved") or {}
    if figures and (figures["non_finite"] or figures["relative_l2"] > UNRELATED):
        found = _other_logits(evidence, figures, "blocker")
        return answer(NAME, evidence, "failed", found.message, (found,))
    if not equal:
        message = (
            f"case {evidence.case.id}: a second, unobserved run gave other tokens; "
            "either the candidate does not repeat itself, or observing it changed what it computes"
        )
        found = _finding(evidence, message, "other tokens", "warning")
        return answer(NAME, evidence, "passed", "other tokens in the second run: see the warning", (found,))
    if figures.get("different"):
        noise = _noise(evidence)
        beyond = noise is not None and figures["relative_l2"] > NOISES * noise
        found = _other_logits(evidence, figures, "warning" if beyond else "note")
        return answer(NAME, evidence, "passed", f"the same tokens, other logits: see the {found.severity}", (found,))
    rows = f", and the same logits to the bit in {figures['rows']:.0f} rows" if figures else ""
    return answer(NAME, evidence, "passed", f"the same tokens, observed and unobserved{rows}")


def _other_logits(evidence: Evidence, figures: dict[str, float], severity: Severity) -> Finding:
    noise = _noise(evidence)
    message = (
        f"case {evidence.case.id}: a second, unobserved run gave other logits in {figures['different']:.0f} of "
        f"{figures['rows']:.0f} rows with the same tokens before them, relative difference {figures['relative_l2']:.2g}"
    )
    message += f" (noise of the claimed precision {noise:.2g})" if noise is not None else ""
    if figures["non_finite"]:
        message += f"; {figures['non_finite']:.0f} rows are not finite there alone"
    unrelated = severity == "blocker"
    if unrelated:
        message += ": what was observed is not what runs unobserved; look for work that is not waited for"
    return _finding(evidence, message, "unrelated logits" if unrelated else "other logits", severity, figures)


def _noise(evidence: Evidence) -> float | None:
    """Relative noise of the logits of the claimed precision, as the net measured it."""
    found = [m.statistics.get("noise_relative_l2") for m in evidence.net or () if m.operator == LOGITS]
    return max((value for value in found if value is not None), default=None)


def _finding(
    evidence: Evidence, message: str, pattern: str, severity: Severity, figures: dict[str, float] | None = None
) -> Finding:
    return Finding(
        id=finding_id(NAME, None, "", None, pattern),
        severity=severity,
        check=NAME,
        operator=None,
        message=message,
        stack_layer="framework",
        value=figures["relative_l2"] if figures else None,
        limit=UNRELATED if severity == "blocker" else None,
        evidence={"case": evidence.case.id, "pattern": pattern, **({"figures": figures} if figures else {})},
    )
