"""What the checks of an endpoint share: their case, and how an answer and a finding are made."""

from __future__ import annotations

from typing import Any

from day0check.checks.evidence import Answer
from day0check.types import CheckOutcome, CheckStatus, Finding, Severity, finding_id

CASE = "endpoint"


def found(
    check: str,
    pattern: str,
    message: str,
    *,
    severity: Severity = "blocker",
    operator: str | None = None,
    label: str | None = None,
    value: float | None = None,
    limit: float | None = None,
    **evidence: Any,
) -> Finding:
    """A finding on the service. `pattern` names the kind of fault and makes the id; `label`: the exchange it was seen
    in; the samples under `--out` hold it byte by byte."""
    return Finding(
        id=finding_id(check, operator, "", "serve", pattern),
        severity=severity,
        check=check,
        operator=operator,
        message=" ".join(message.split()),
        phase="serve",
        request=f"{CASE}/{label}" if label else None,
        value=value,
        limit=limit,
        stack_layer="framework",
        evidence={"case": CASE, "pattern": pattern, **evidence},
    )


def answered(check: str, findings: list[Finding] | tuple[Finding, ...], summary: str, *, not_run: str = "") -> Answer:
    """Failed with blockers among the findings; else not run when `not_run` gives a reason; else passed."""
    blockers = [f for f in findings if f.severity == "blocker"]
    status: CheckStatus = "failed" if blockers else "not_run" if not_run else "passed"
    text = blockers[0].message if blockers else not_run or summary
    return Answer(CheckOutcome(check, status, CASE, " ".join(text.split())), tuple(findings))
