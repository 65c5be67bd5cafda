"""From the records of a run to its verdict: every check reads the evidence of every case, and the gate decides."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from day0check.baseline import load_shape
from day0check.checks import Evidence, checks_of, judge_case, judge_run, read_evidence
from day0check.checks.coverage import left_out
from day0check.checks.weights import judge_audit
from day0check.errors import Day0Error, InputError
from day0check.gate import Scene
from day0check.types import CheckOutcome, Finding, NotRun
from day0check.verdict_rows import choice_rows, drift_rows, operator_rows

if TYPE_CHECKING:
    from day0check.audit import Audited
    from day0check.runner import CaseResult
    from reference.config import ModelConfig


@dataclass(frozen=True)
class Judged:
    """What the checks of a run answered and found, and the scene for the gate."""

    outcomes: tuple[CheckOutcome, ...]
    findings: tuple[Finding, ...]
    scene: Scene


def judge(
    results: Sequence[CaseResult],
    out: Path,
    *,
    config: ModelConfig,
    model: dict[str, Any],
    profile: str,
    environment: dict[str, Any],
    audited: Audited,
    not_run: tuple[NotRun, ...] = (),
    partial: bool = False,
) -> Judged:
    """Asks the checks of every case about its evidence under `out`. Raises Day0Error when our records are damaged."""
    first = judge_audit(audited.findings, tensors=audited.tensors, files=audited.files)
    outcomes: list[CheckOutcome] = [first.outcome]
    findings: list[Finding] = list(first.findings)
    local, net, expected = {}, {}, [("", first.outcome.name)]
    every: list[Evidence] = []
    for result in results:
        case = result.case
        try:
            capabilities = frozenset(result.candidate.capabilities)
            evidence = read_evidence(out, case, config=config, profile=profile, capabilities=capabilities)
        except InputError as cause:  # we wrote these files: that they cannot be read is our fault, not the user's
            raise Day0Error(cause.what, where=cause.where, todo=cause.todo) from cause
        local[case.id], net[case.id] = evidence.measures, evidence.net or ()
        expected += [(case.id, check) for check in checks_of(case, config)]
        every.append(evidence)
        for answer in judge_case(evidence):
            outcomes.append(answer.outcome)
            findings += [_with_case(f, case.id) for f in answer.findings]
    for answer in judge_run(every):
        outcomes.append(answer.outcome)
        findings += answer.findings
    findings += left_out(every)
    scene = Scene(
        model=model,
        profile=profile,
        cases=tuple(result.case.id for result in results),
        expected=tuple(expected),
        not_run=not_run,
        drift=drift_rows(net),
        choices=choice_rows(local, net),
        operators=operator_rows(local),
        environment=environment,
        measured=measured(results),
        partial=partial,
    )
    return Judged(tuple(outcomes), tuple(findings), scene)


def _with_case(finding: Finding, case: str) -> Finding:
    return finding if "case" in finding.evidence else replace(finding, evidence={**finding.evidence, "case": case})


def measured(results: Sequence[CaseResult]) -> dict[str, Any]:
    """Seconds and bytes of every case, judging included; the candidate's own times are in its timing.jsonl. `fused`:
    calls of each group of operators that the candidate ran as one, where it has any."""
    cases: dict[str, Any] = {}
    fused: dict[str, int] = {}
    for result in results:
        row: dict[str, Any] = {"load": load_shape(result.case)}
        for role, record in (("candidate", result.candidate), ("reference", result.reference)):
            if record is not None:
                row[role] = {"seconds": record.seconds, "peak_rss_bytes": record.peak_rss_bytes}
        cases[result.case.id] = row
        for group, so_far in result.candidate.fused.items():
            fused[group] = max(fused.get(group, 0), so_far)  # a process counts on from case to case
    return {"cases": cases, **({"fused": fused} if fused else {})}


def moment() -> str:
    """Now, in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
