"""The unobserved repeat of a case: observing must change nothing, and the same case must be answered the same twice."""

from __future__ import annotations

from day0check.checks.evidence import Answer, Evidence, answer
from day0check.types import Finding, finding_id

QUESTION = "Does the candidate give the same tokens when it runs the case a second time, unobserved?"
NAME = "repeat"


def judge(evidence: Evidence) -> Answer:
    """A difference is a warning: kernels may legally sum in another order from run to run, and a near tie then flips.
    It says that no figure of this case is reproducible to the bit, and that the observer itself may have mattered.
    """
    if not evidence.finished:
        return answer(NAME, evidence, "not_run", "the candidate did not finish the case")
    equal = evidence.run.get("repeat_equal")
    if equal is None:
        return answer(NAME, evidence, "not_run", "the case was run only once")
    if equal:
        return answer(NAME, evidence, "passed", "the same tokens, observed and unobserved")
    message = (
        f"case {evidence.case.id}: a second, unobserved run gave other tokens; "
        "either the candidate does not repeat itself, or observing it changed what it computes"
    )
    found = Finding(
        id=finding_id(NAME, None, "", None, "other tokens"),
        severity="warning",
        check=NAME,
        operator=None,
        message=message,
        stack_layer="framework",
        evidence={"case": evidence.case.id},
    )
    return answer(NAME, evidence, "passed", "other tokens in the second run: see the warning", (found,))
