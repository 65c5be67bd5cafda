"""Input of a step, and memory that goes to the host tier and back: when their copies are made shows in no result."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from day0check.checks.evidence import FINISHED, Answer, Evidence
from day0check.checks.invariants.extra_runs import (
    JUDGED,
    ExtraRun,
    again,
    answered,
    forced,
    name_of,
    pairs,
)
from day0check.checks.invariants.judging import judge_runs
from day0check.checks.invariants.offloaded import LEAVES, away, long_enough, pages_of
from day0check.types import Finding, Outputs, Request, RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

QUESTION = "Are the bytes the same whether copies from and to the host are made at once or as late as they may be?"
NAME = "delayed_copies"
LATE, CONTROL = "copies-late", "copies-at-once"
RUNS = {
    LATE: ("late", "each copy out of a host buffer made at the last moment that is legal"),
    CONTROL: ("at_once", "each copy out of a host buffer made at once, one after the other"),
}
TIER_LATE, TIER_CONTROL = "tier-late", "tier-at-once"
CONTROLS = {LATE: CONTROL, TIER_LATE: TIER_CONTROL}
_RACES = {
    CONTROL: "a buffer is written again before its copy was made",
    TIER_CONTROL: "memory is used before its copy was made",
}


def runs(case: RunCase, outputs: Outputs, config: ModelConfig) -> tuple[ExtraRun, ...]:
    """The judged schedule with copies as late as they may be, and with copies one after the other as its control; and
    both with the first request that decodes for long enough in the host tier, while others come and use its memory."""
    compared = answered(case, outputs)
    if not compared:
        return ()
    requests = tuple(forced(r, outputs) for r in case.requests if r.id in outputs.sequences)
    found = [again(case, outputs)]
    for label, (moment, words) in RUNS.items():
        schedule = replace(case.schedule, copies=moment)
        found.append(ExtraRun(label, words, requests, schedule, pairs(compared), bits=True, law="copies"))
    return (*found, *_through_the_tier(case, compared, outputs))


def _through_the_tier(case: RunCase, compared: tuple[Request, ...], outputs: Outputs) -> tuple[ExtraRun, ...]:
    request = next(filter(long_enough, compared), None)
    if request is None:
        return ()
    needs = {r.id: pages_of(case, r, outputs) for r in compared}
    own = needs.pop(request.id)
    pages = max(own, sum(needs.values())) if needs else 2 * own  # who comes takes those that were left
    schedule = replace(away(case, compared, request, outputs), pages=pages)
    requests = tuple(replace(r, arrive_step=0 if r is request else LEAVES) for r in compared)
    words = f"request {name_of(request.id)} in the host tier while others use its memory, and copies"
    shows = {"once": (request.id,), "rested": (request.id,)}
    late, control = (
        ExtraRun(
            label,
            f"{words} {when}",
            requests,
            replace(schedule, copies=moment),
            pairs(compared),
            against=against,
            bits=True,
            **shows,
        )
        for label, moment, when, against in (
            (TIER_LATE, "late", "made at the last moment that is legal", TIER_CONTROL),
            (TIER_CONTROL, "at_once", "made one after the other", JUDGED),
        )
    )
    return late, control


def judge(evidence: Evidence) -> Answer:
    found = judge_runs(NAME, evidence, runs, nothing="no request of the case was answered")
    if found.outcome.status != "failed":
        return found
    findings = tuple(_with_control(evidence, finding) for finding in found.findings)
    return Answer(replace(found.outcome, summary=findings[0].message), findings)


def _with_control(evidence: Evidence, finding: Finding) -> Finding:
    """The finding with what the serialised run says of it: a race is what only delay shows."""
    control = CONTROLS.get(str(finding.evidence.get("run", LATE)))
    if control is None:
        return finding
    clean = _control_is_clean(evidence, finding, control)
    words = {
        True: f"with the copies made one after the other nothing differs: a race, where {_RACES[control]}",
        False: "with the copies made one after the other it is wrong, too: no race alone",
        None: "whether it is a race is not known: the run with the copies made one after the other says nothing",
    }[clean]
    return replace(
        finding, message=f"{finding.message}; {words}", evidence={**finding.evidence, "serialised_run_agrees": clean}
    )


def _control_is_clean(evidence: Evidence, finding: Finding, label: str) -> bool | None:
    control = evidence.extra.get(label)
    if control is None or control.status == "unavailable":
        return None
    if label in finding.evidence.get("other_runs", ()) or control.status != FINISHED:
        return False
    if control.comparison is None or control.comparison.missing:
        return None
    return all(measure.passed for measure in control.comparison.measures)
