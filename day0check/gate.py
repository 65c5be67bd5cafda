"""The gate: the only place that decides a status and an exit code.

It fails closed. `ready` needs every expected (case, check) to have answered and passed; what did not run is named and
makes the verdict `inconclusive`; a blocker that no valid waiver holds makes it `not_ready`; a fault of the harness
itself makes it `error`. The strongest wins: error, not_ready, inconclusive, ready.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from day0check.compare.locate import first_fault
from day0check.errors import Day0Error, ExitCode, InputError
from day0check.types import (
    SCHEMA_VERSION,
    CheckOutcome,
    Finding,
    NotRun,
    Status,
    Verdict,
    from_json,
    to_json,
)
from day0check.waivers import CHECK as WAIVERS
from day0check.waivers import Waiver, apply_waivers

SIGNIFICANT_DIGITS = 6
BASELINE = "baseline."  # the checks that compare with a recorded baseline begin so
_EXIT_CODES: dict[str, ExitCode] = {
    "ready": ExitCode.READY,
    "not_ready": ExitCode.NOT_READY,
    "inconclusive": ExitCode.INCONCLUSIVE,
    "error": ExitCode.HARNESS,
}


@dataclass(frozen=True)
class Scene:
    """Everything of a verdict that the gate does not decide. `expected`: the (case, check) pairs that had to answer.
    `not_run`: what the plan itself left out. `partial`: the user chose cases, so not all of a stage was run."""

    model: dict[str, Any]
    profile: str
    cases: tuple[str, ...]
    expected: tuple[tuple[str, str], ...] = ()
    not_run: tuple[NotRun, ...] = ()
    drift: tuple[dict[str, Any], ...] = ()
    choices: tuple[dict[str, Any], ...] = ()
    operators: tuple[dict[str, Any], ...] = ()
    environment: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    partial: bool = False


def decide(
    outcomes: Sequence[CheckOutcome],
    findings: Sequence[Finding],
    scene: Scene,
    *,
    waivers: Sequence[Waiver] = (),
    today: datetime.date | None = None,
) -> Verdict:
    """The verdict on what the checks answered and found.

    `today` is needed with waivers only (their dates); it never reaches the verdict.
    """
    findings = apply_waivers(findings, waivers, today=today or datetime.date.today(), partial=scene.partial)
    not_run = _unique((*scene.not_run, *_unanswered(outcomes, scene.expected), *_named(outcomes)))
    status = _status(outcomes, findings, not_run)
    return Verdict(
        status=status,
        model=scene.model,
        profile=scene.profile,
        cases=scene.cases,
        findings=findings,
        first_fault=_first(findings),
        checks=tuple(outcomes),
        not_run=not_run,
        drift=scene.drift,
        choices=scene.choices,
        operators=scene.operators,
        environment=scene.environment,
        measured=scene.measured,
    )


def exit_code(verdict: Verdict) -> ExitCode:
    """The exit code that a verdict's status owns."""
    return _EXIT_CODES[verdict.status]


def _status(outcomes: Sequence[CheckOutcome], findings: Sequence[Finding], not_run: Sequence[NotRun]) -> Status:
    blockers = [f for f in findings if f.severity == "blocker" and not f.waived]
    if any(f.stack_layer == "harness" for f in blockers):
        return "error"
    if blockers or any(o.status == "failed" and not _explained(o, findings) for o in outcomes):
        return "not_ready"
    if not_run or not outcomes:
        return "inconclusive"
    return "ready"


def _explained(outcome: CheckOutcome, findings: Sequence[Finding]) -> bool:
    """A failed check counts as accepted only when it gave blockers and every one of them is waived."""
    own = [f for f in findings if f.check == outcome.name and f.severity == "blocker" and _of_case(f, outcome.case)]
    return bool(own) and all(f.waived for f in own)


def _of_case(finding: Finding, case: str) -> bool:
    named = finding.evidence.get("case")
    if named is not None:
        return named == case
    return not case or finding.request is None or finding.request.startswith(f"{case}/")


def _unanswered(outcomes: Sequence[CheckOutcome], expected: Iterable[tuple[str, str]]) -> tuple[NotRun, ...]:
    answered = {(o.case, o.name) for o in outcomes}
    return tuple(
        NotRun(f"{check} of {case}" if case else check, "it gave no answer")
        for case, check in expected
        if (case, check) not in answered
    )


def _named(outcomes: Sequence[CheckOutcome]) -> tuple[NotRun, ...]:
    return tuple(
        NotRun(f"{o.name} of {o.case}" if o.case else o.name, o.summary or "no reason given")
        for o in outcomes
        if o.status == "not_run"
    )


def _unique(items: Iterable[NotRun]) -> tuple[NotRun, ...]:
    """In order; of several reasons for the same check the first stays."""
    kept: dict[str, NotRun] = {}
    for item in items:
        kept.setdefault(item.check, item)
    return tuple(kept.values())


def _first(findings: Sequence[Finding]) -> Finding | None:
    """What to repair first: a fault of the harness, then what localisation names, then the baseline's and waivers'."""
    harness = [f for f in findings if f.stack_layer == "harness"]
    own = [f for f in findings if f.check != WAIVERS and not f.check.startswith(BASELINE)]
    return first_fault(harness) or first_fault(own) or first_fault(findings)


# ------------------------------------------------------------------------------------------------ the file itself


def render(verdict: Verdict) -> str:
    """`verdict.json`: sorted keys, floats to 6 significant digits, no NaN spelled as a bare word."""
    data = _rounded(to_json(verdict))
    return json.dumps(data, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{SIGNIFICANT_DIGITS}g}") + 0.0  # + 0.0: one spelling of zero
    return value


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all. Raises Day0Error when the disk does not take it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")
        partial.replace(path)
    except OSError as cause:
        with contextlib.suppress(OSError):
            partial.unlink()
        todo = "free some space and run again" if cause.errno == errno.ENOSPC else "choose another --out"
        raise Day0Error(f"cannot be written: {cause.strerror}", where=str(path), todo=todo) from cause


def write_verdict(verdict: Verdict, path: Path) -> None:
    write_text(path, render(verdict))


def read_verdict(path: Path) -> Verdict:
    """The verdict of a run. Raises InputError for a file that is absent, cut, of a newer schema or of another kind."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError("there is no such file", where=str(path), todo="give the --out folder of a run") from None
    except (OSError, ValueError) as cause:
        raise InputError(
            f"not readable as JSON: {cause}", where=str(path), todo="run again to write it anew"
        ) from cause
    version = data.get("schema_version") if isinstance(data, dict) else None
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise InputError(
            f"schema_version is {version!r}, this day0check reads up to {SCHEMA_VERSION}",
            where=str(path),
            todo="use the day0check that wrote it, or a newer one",
        )
    try:
        return from_json(Verdict, data)
    except ValueError as cause:
        raise InputError(f"not a verdict: {cause}", where=str(path), todo="run again to write it anew") from cause
