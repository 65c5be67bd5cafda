"""Input of a step on its way to the device: when its copies are made shows in no result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from day0check.checks.evidence import FINISHED, Answer, Evidence
from day0check.checks.invariants.extra_runs import ExtraRun, again, answered, forced, pairs
from day0check.checks.invariants.judging import judge_runs
from day0check.types import Finding, Outputs, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Are the bytes the same whether copies out of host buffers are made at once or as late as they may be?"
NAME = "delayed_copies"
LATE, CONTROL = "copies-late", "copies-at-once"
RUNS = {
    LATE: ("late", "each copy out of a host buffer made at the last moment that is legal"),
    CONTROL: ("at_once", "each copy out of a host buffer made at once, one after the other"),
}


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """The judged schedule with copies as late as they may be, and with copies one after the other as its control."""
    compared = answered(case, outputs)
    if not compared:
        return ()
    requests = tuple(forced(r, outputs) for r in case.requests if r.id in outputs.sequences)
    found = [again(case, outputs)]
    for label, (moment, words) in RUNS.items():
        schedule = replace(case.schedule, copies=moment)
        found.append(ExtraRun(label, words, requests, schedule, pairs(compared), bits=True, law="copies"))
    return tuple(found)


def judge(evidence: Evidence) -> Answer:
    found = judge_runs(NAME, evidence, runs, nothing="no request of the case was answered")
    if found.outcome.status != "failed":
        return found
    findings = tuple(_with_control(evidence, finding) for finding in found.findings)
    return Answer(replace(found.outcome, summary=findings[0].message), findings)


def _with_control(evidence: Evidence, finding: Finding) -> Finding:
    """The finding with what the serialised run says of it: a race is what only delay shows."""
    if finding.evidence.get("run", LATE) != LATE:
        return finding
    clean = _control_is_clean(evidence, finding)
    words = {
        True: "with the copies made one after the other nothing differs: a race, where a buffer is written again "
        "before its copy was made",
        False: "with the copies made one after the other it is wrong, too: no race alone",
        None: "whether it is a race is not known: the run with the copies made one after the other says nothing",
    }[clean]
    return replace(
        finding, message=f"{finding.message}; {words}", evidence={**finding.evidence, "serialised_run_agrees": clean}
    )


def _control_is_clean(evidence: Evidence, finding: Finding) -> bool | None:
    control = evidence.extra.get(CONTROL)
    if control is None or control.status == "unavailable":
        return None
    if CONTROL in finding.evidence.get("other_runs", ()) or control.status != FINISHED:
        return False
    return None if control.comparison is None or control.comparison.missing else True
