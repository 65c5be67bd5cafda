"""The cases under `service/` of a run: our server is started for them, asked over HTTP, and stopped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from day0check.errors import UsageError
from day0check.snapshot import case_directory
from day0check.types import NotRun, RunCase

if TYPE_CHECKING:
    from day0check.cli.assemble import Judged
    from day0check.cli.resolve import Model
    from day0check.service.inspect import Plan

FOLDER = "service/"
SERVED_BACKEND = "accelerated"
PARTS = ("tools", "interference")
TOGETHER, WORDS, TOKENS, FOLLOWED = 3, 4, 8, 2
MAX_BATCH = 16
STALL_S = 60.0  # of an answer that comes in one piece, behind others, on a busy machine


def split(cases: Sequence[RunCase]) -> tuple[tuple[RunCase, ...], tuple[RunCase, ...]]:
    """(cases of the engine, cases of the service)."""
    own = tuple(case for case in cases if case.id.startswith(FOLDER))
    return tuple(case for case in cases if case not in own), own


def servable(
    cases: tuple[RunCase, ...], *, backend: str, one_device: bool, selectors: tuple[str, ...]
) -> tuple[RunCase, ...]:
    """The cases without those that need our server when it is not our engine, whole, that is run.

    Raises UsageError when such a case was asked for by name.
    """
    if backend == SERVED_BACKEND and one_device:
        return cases
    named = next((s for s in selectors if s.startswith(FOLDER.rstrip("/"))), None)
    if named is not None:
        todo = "serve your engine yourself and give its address to `day0check endpoint`"
        raise UsageError(f"only backend {SERVED_BACKEND} on one device has a server", where=named, todo=todo)
    return split(cases)[0]


def plan_of(model: Model, *, profile: str, time_limit_s: float) -> Plan:
    """The small set of questions of a run: enough to drive every path of the server once."""
    from day0check.load.client import Limits
    from day0check.load.scenario import Wish
    from day0check.service.following import ends_of
    from day0check.service.inspect import Plan, Reference

    return Plan(
        Wish(parts=PARTS, together=TOGETHER, words=WORDS, tokens=TOKENS),
        limits=Limits(seconds=time_limit_s, request_s=time_limit_s, stall_s=STALL_S),
        profile=profile,
        reference=Reference(model.directory, model.config, ends_of(model.directory, model.config), FOLLOWED),
    )


def with_service(
    judged: Judged,
    cases: Sequence[RunCase],
    model: Model,
    folder: Path,
    *,
    profile: str,
    device: str,
    ops: str | None = None,
    scheduler: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Judged:
    """`judged` with the answers of the service cases; their records lie under `folder`."""
    from day0check.contracts.profiles import profile_named
    from day0check.service.inspect import ask_own
    from day0check.service.process import ServerPlan

    for case in cases:
        tell(case.id)
        home = case_directory(folder, case.id, "service")
        server = ServerPlan(
            str(model.directory),
            model.name,
            folder / "logs" / f"{case.id.replace('/', '__')}.log",
            profile=profile_named(profile).base,
            device=device,
            ops=ops,
            scheduler=scheduler,
            more=("--max-batch", str(MAX_BATCH)),
        )
        plan = plan_of(model, profile=profile, time_limit_s=case.time_limit_s)
        asked = ask_own(server, plan, home, case=case.id)
        scene = judged.scene
        scene = replace(
            scene,
            cases=(*scene.cases, case.id),
            expected=(*scene.expected, *((case.id, name) for name in asked.expected)),
            not_run=(*scene.not_run, *(NotRun(f"{n.check} of {case.id}", n.reason) for n in asked.not_run)),
            measured={**scene.measured, "service": {**scene.measured.get("service", {}), case.id: asked.measured}},
        )
        judged = replace(
            judged,
            outcomes=(*judged.outcomes, *(a.outcome for a in asked.answers)),
            findings=(*judged.findings, *(f for a in asked.answers for f in a.findings)),
            scene=scene,
        )
    return judged
