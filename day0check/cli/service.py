"""The cases under `service/` of a run, beside those of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from day0check.errors import UsageError
from day0check.types import NotRun, RunCase

if TYPE_CHECKING:
    from day0check.cli.assemble import Judged
    from day0check.service.cases import Served

SERVED_BACKEND = "accelerated"


def split(cases: Sequence[RunCase]) -> tuple[tuple[RunCase, ...], tuple[RunCase, ...]]:
    """(cases of the engine, cases of the service)."""
    from day0check.service.cases import is_service_case

    return tuple(c for c in cases if not is_service_case(c)), tuple(c for c in cases if is_service_case(c))


def servable(
    cases: tuple[RunCase, ...], *, backend: str, one_device: bool, selectors: tuple[str, ...]
) -> tuple[RunCase, ...]:
    """The cases without those that need our server when it is not our engine, whole, that is run.

    Raises UsageError when such a case was asked for by name.
    """
    if backend == SERVED_BACKEND and one_device:
        return cases
    named = next((s for s in selectors if s.partition("/")[0] == "service"), None)
    if named is not None:
        todo = "serve your engine yourself and give its address to `day0check endpoint`"
        raise UsageError(f"only backend {SERVED_BACKEND} on one device has a server", where=named, todo=todo)
    return split(cases)[0]


def with_service(judged: Judged, cases: Sequence[RunCase], what: Served, folder: Path) -> Judged:
    """`judged` with the answers of the service cases; their records lie under `folder`."""
    from day0check.service.cases import ask_case

    for case in cases:
        asked = ask_case(case, what, folder)
        scene = judged.scene
        service = {**scene.measured.get("service", {}), case.id: asked.measured}
        scene = replace(
            scene,
            cases=(*scene.cases, case.id),
            expected=(*scene.expected, *((case.id, name) for name in asked.expected)),
            not_run=(*scene.not_run, *(NotRun(f"{n.check} of {case.id}", n.reason) for n in asked.not_run)),
            measured={**scene.measured, "service": service},
        )
        judged = replace(
            judged,
            outcomes=(*judged.outcomes, *(a.outcome for a in asked.answers)),
            findings=(*judged.findings, *(f for a in asked.answers for f in a.findings)),
            scene=scene,
        )
    return judged
