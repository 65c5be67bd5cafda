"""Asks an endpoint, keeps what came, holds it against the reference and against itself; our own server whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from day0check.checks import service_operators, service_start
from day0check.checks.endpoint import CASE, endpoint_checks_of, exercised, judge_endpoint
from day0check.checks.endpoint.exercised import most_at_once
from day0check.checks.endpoint.interference import Row, further_rows, rows
from day0check.checks.evidence import Answer
from day0check.contracts.profiles import profile_named
from day0check.load.client import Limits, Target, target_of
from day0check.load.kept import Keeper
from day0check.load.observe import observe
from day0check.load.observed import Observed
from day0check.load.scenario import Wish
from day0check.load.speed import SpeedPlan
from day0check.service.following import followable, in_doubt, prompts
from day0check.service.process import Server, ServerPlan, served
from day0check.snapshot import read_measures
from day0check.types import Finding, NotRun, to_json

if TYPE_CHECKING:
    from reference.config import ModelConfig

Tell = Callable[[str], None]
INTERFERENCE = "interference"  # the part
MOST_ROWS = 64  # of the interference table
CHECKS = (service_start.NAME, service_operators.NAME)


@dataclass(frozen=True)
class Reference:
    """The served model's files: what its answers are held against. `most`: how many answers at the most."""

    directory: Path
    config: ModelConfig
    ends: tuple[int, ...] = ()
    most: int | None = None

    def wish(self, wish: Wish, seed: int) -> Wish:
        """The wish with prompts to be followed and the end tokens to be tried."""
        return replace(wish, followed=prompts(self.config, seed=seed)[: self.most], ends=self.ends)


@dataclass(frozen=True)
class Plan:
    """What to ask of an endpoint and how to judge it."""

    wish: Wish
    limits: Limits = field(default_factory=Limits)
    speed: SpeedPlan = field(default_factory=SpeedPlan)
    profile: str = "bf16"
    slo_share: float = 0.99
    seed: int = 0
    reference: Reference | None = None


@dataclass(frozen=True)
class Asked:
    """What was seen, and what the checks answered to it."""

    observed: Observed
    answers: tuple[Answer, ...]
    expected: tuple[str, ...]
    not_run: tuple[NotRun, ...]
    measured: dict[str, Any] = field(default_factory=dict)


def ask(target: Target, plan: Plan, folder: Path, tell: Tell = lambda _: None) -> Asked:
    """Asks the endpoint at `target`, keeps the raw samples under `folder`, asks the reference, and judges.

    Raises UsageError when nothing listens there or a key is missing.
    """
    reference, wish = plan.reference, plan.wish
    if reference is not None:
        wish = reference.wish(wish, plan.seed)
    seen = observe(target, wish, limits=plan.limits, speed=plan.speed, tell=tell, keeper=Keeper(folder))
    return judge(seen.observed, plan, tell)


def judge(observed: Observed, plan: Plan, tell: Tell = lambda _: None) -> Asked:
    """Judges what was seen; the reference follows the answers that it can follow."""
    reference = plan.reference
    observed = replace(observed, profile=profile_named(plan.profile).base, slo_share=plan.slo_share)
    if reference is not None:
        tell("reference")
        observed = _with_reference(observed, reference, plan)
    sees = None if reference is None else reference.config.vision is not None
    answers = judge_endpoint(observed, reference=reference is not None, sees=sees)
    expected = endpoint_checks_of(observed.parts, reference=reference is not None)
    return Asked(observed, answers, expected, _not_run(observed), figures(observed))


def figures(observed: Observed) -> dict[str, Any]:
    """Everything in time and counts of what was seen."""
    together = [e for e in observed.exchanges if e.label.startswith("together/")]
    return {
        "load": observed.speed,
        "requests": len(observed.exchanges),
        "most_in_flight": most_at_once(together),
        "exercised": exercised.figures(observed) if INTERFERENCE in observed.done else [],
        "counters": [{"moment": c.label, "values": c.values} for c in observed.counters],
        "interference": [_row(r) for r in _table(observed)[:MOST_ROWS]],
        "soak": dict(observed.soak),
        "matched": None if observed.matched is None else to_json(observed.matched),
    }


def _table(observed: Observed) -> list[Row]:
    table = rows(observed)
    return [*table, *(r for members in further_rows(observed, table).values() for r in members)]


def _row(row: Row) -> dict[str, Any]:
    beside, repeat = row.beside, row.repeat
    return {
        "label": row.label,
        "same_text": beside.same_text,
        "token": beside.at,
        "margin": beside.margin,
        "delta_logprob": beside.delta,
        "repeat_same_text": repeat.same_text,
        "repeat_delta_logprob": repeat.delta,
    }


def _with_reference(observed: Observed, reference: Reference, plan: Plan) -> Observed:
    from day0check.compare.wire import follow, matched

    if doubted := in_doubt(observed):
        observed = replace(
            observed, doubted=follow(reference.directory, profile_named(plan.profile), doubted, seed=plan.seed)
        )
    answers, reason = followable(observed.exchanges)
    if not answers:
        return replace(observed, reference_reason=reason)
    rows = follow(reference.directory, profile_named(plan.profile), answers, seed=plan.seed)
    # of our own server, asked few questions, every call is replayed: nothing is left to be guessed from its answers
    told = None if reference.most is not None else matched(reference.directory, profile_named(plan.profile), answers)
    return replace(observed, reference=rows, reference_reason=reason, matched=told)


def _not_run(observed: Observed) -> tuple[NotRun, ...]:
    why = observed.stopped or "it did not run to its end"
    return tuple(NotRun(f"part {part}", why) for part in observed.parts if part not in observed.done)


# -------------------------------------------------------------------------------------------------- our own server


def ask_own(server_plan: ServerPlan, plan: Plan, folder: Path, *, case: str, tell: Tell = lambda _: None) -> Asked:
    """Starts our server, asks it, stops it, and judges it under the id `case`; it never raises for what a server does.

    The answers carry `service.start` and `service.operators` in front; `measured` holds the seconds of the start.
    """
    begin = time.monotonic()
    judged = folder / "operators.jsonl"
    asked: Asked | None = None
    with served(replace(server_plan, judged=judged)) as server:
        started = not server.why
        if started:
            tell("serve")
            target, wish = target_of(server.url), plan.wish
            if plan.reference is not None:
                wish = plan.reference.wish(wish, plan.seed)
            seen = observe(target, wish, limits=plan.limits, speed=plan.speed, tell=tell, keeper=Keeper(folder))
    if started:
        asked = judge(seen.observed, plan, tell)
    return _joined(server, asked, judged, case, plan, seconds=time.monotonic() - begin)


def _joined(server: Server, asked: Asked | None, judged: Path, case: str, plan: Plan, *, seconds: float) -> Asked:
    notes: list[str] = []
    measures = read_measures(judged, notes)
    first = service_start.judge(
        why=server.why,
        operator=server.operator,
        early=server.early,
        steps=server.steps,
        code=server.code,
        forced=server.forced,
    )
    reason = "; ".join(notes) or ("the server did not start" if server.why else "")
    chat = asked is None or asked.observed.api != "completions"
    operators = service_operators.judge(measures, chat=chat, reason=reason)
    answers = [first, operators, *(asked.answers if asked else ())]
    measured = {"start": {**server.seconds, "steps": server.steps}, "seconds": seconds}
    expected = endpoint_checks_of(plan.wish.parts, reference=plan.reference is not None)
    observed = asked.observed if asked else Observed("", "", plan.wish.parts, stopped="the server did not start")
    return Asked(
        observed,
        tuple(under(answer, case) for answer in answers),
        (*CHECKS, *expected),
        asked.not_run if asked else (),
        measured | (asked.measured if asked else {}),
    )


def under(answer: Answer, case: str) -> Answer:
    """The answer as one of the case `case`. Notes stay in what was measured: near-ties fall as the steps happen to be
    laid, and a verdict is the same in every run."""
    findings = tuple(_under(f, case) for f in answer.findings if f.severity != "note")
    return Answer(replace(answer.outcome, case=case), findings)


def _under(finding: Finding, case: str) -> Finding:
    request = finding.request
    if request is not None and request.startswith(f"{CASE}/"):
        request = f"{case}/{request.removeprefix(f'{CASE}/')}"
    return replace(finding, request=request, evidence={**finding.evidence, "case": case})
