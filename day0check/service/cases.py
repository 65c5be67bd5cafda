"""A case under `service/`: our server started for it, asked the small set of questions of a run, and stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from day0check.contracts.profiles import profile_named
from day0check.load.client import Limits
from day0check.load.scenario import Wish
from day0check.service.following import ends_of
from day0check.service.inspect import Asked, Plan, Reference, ask_own
from day0check.service.process import ServerPlan
from day0check.snapshot import case_directory
from day0check.types import RunCase

if TYPE_CHECKING:
    from reference.config import ModelConfig

FOLDER = "service/"
PARTS = ("tools", "interference")
TOGETHER, WORDS, TOKENS, FOLLOWED = 3, 4, 8, 2
MAX_BATCH = 16


@dataclass(frozen=True)
class Served:
    """What is served: the model's files, and what is laid over our engine."""

    directory: Path
    name: str
    config: ModelConfig
    profile: str = "bf16"
    device: str = "cpu"
    ops: str | None = None
    scheduler: str | None = None


def is_service_case(case: RunCase) -> bool:
    return case.id.startswith(FOLDER)


def ask_case(case: RunCase, what: Served, out: Path, tell: Callable[[str], None] = lambda _: None) -> Asked:
    """The answers of one service case; its records lie under the output directory `out` of the run."""
    server = ServerPlan(
        str(what.directory),
        what.name,
        out / "logs" / f"{case.id.replace('/', '__')}.log",
        profile=profile_named(what.profile).base,
        device=what.device,
        ops=what.ops,
        scheduler=what.scheduler,
        more=("--max-batch", str(MAX_BATCH)),
    )
    return ask_own(server, questions(case, what), case_directory(out, case.id, "service"), case=case.id, tell=tell)


def questions(case: RunCase, what: Served) -> Plan:
    """Enough to drive every path of the server once."""
    return Plan(
        Wish(parts=PARTS, together=TOGETHER, words=WORDS, tokens=TOKENS),
        limits=Limits(seconds=case.time_limit_s, request_s=case.time_limit_s, stall_s=case.time_limit_s),
        profile=what.profile,
        reference=Reference(what.directory, what.config, ends_of(what.directory, what.config), FOLLOWED),
    )
