"""`day0check endpoint`: one verdict of correctness and speed on a live OpenAI-compatible endpoint."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from day0check.cli.app import OUT_KEY
from day0check.cli.options import RUN_FACTS, Duration, deliver, today, waivers_of
from day0check.errors import UsageError
from day0check.types import Finding

if TYPE_CHECKING:
    from day0check.cli.resolve import Model
    from day0check.load.observed import Observed
    from day0check.service.inspect import Plan
    from day0check.types import Verdict

PARTS = ("parameters", "wire", "tools", "interference", "speed")
SWEEP = "1,2,4,8,16,32,64,128"
SLOS = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


class Slo(click.ParamType):
    """`ttft_ms=200`."""

    name = "slo"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, float]:
        if isinstance(value, tuple):
            return value
        name, _, limit = str(value).partition("=")
        try:
            number = float(limit)
        except ValueError:
            number = 0.0
        if name not in SLOS or not 0 < number < float("inf"):
            self.fail(f"{value!r}: write NAME=MILLISECONDS with a name out of {', '.join(SLOS)}", param, ctx)
        return name, number


class Counts(click.ParamType):
    """`1,2,4`."""

    name = "counts"

    def __init__(self, most: int = 1024) -> None:
        self.most = most

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(p.strip().isdecimal() and 1 <= int(p) <= self.most for p in parts):
            self.fail(f"{value!r}: write numbers from 1 to {self.most} with commas between", param, ctx)
        return tuple(int(p) for p in parts)


@dataclass(frozen=True)
class Wanted:
    """The options as given."""

    url: str
    reference: str | None
    served: str | None
    api_key_env: str | None
    profile: str
    parts: tuple[str, ...]
    budget_s: float
    time_limit_s: float
    stall_s: float
    concurrency: tuple[int, ...]
    requests: int
    rate_per_s: float | None
    arrivals: str
    slos: tuple[tuple[str, float], ...]
    slo_share: float
    seed: int
    soak: int
    contexts: tuple[int, ...]
    trace: Path | None
    waivers: Path | None


@click.command()
@click.option("--url", required=True, help="Where the endpoint is, like http://127.0.0.1:8000.")
@click.option("--reference", metavar="PRESET|DIR", help="The served model's files; greedy answers are held against it.")
@click.option("--model", "served", metavar="NAME", help="The model's name there. [default: the first it lists]")
@click.option("--api-key-env", metavar="VARIABLE", help="The environment variable that holds the key.")
@click.option("--profile", default="bf16", show_default=True, help="The precision that the endpoint claims.")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this part; repeatable.")
@click.option("--budget", "budget_s", type=Duration(), default="10m", show_default=True, metavar="TIME")
@click.option(
    "--time-limit", "time_limit_s", type=Duration(), default="60s", show_default=True, help="Of each request."
)
@click.option(
    "--stall", "stall_s", type=Duration(), default="20s", show_default=True, help="Longest silence inside an answer."
)
@click.option("--concurrency", type=Counts(), default=SWEEP, show_default=True, help="Sweep, until it saturates.")
@click.option("--requests", type=click.IntRange(1, 10000), default=32, show_default=True, help="Of each load phase.")
@click.option("--rate", "rate_per_s", type=click.FloatRange(0, min_open=True), help="Of the open loop, per second.")
@click.option("--arrivals", type=click.Choice(("poisson", "constant")), default="poisson", show_default=True)
@click.option(
    "--trace", type=click.Path(path_type=Path), metavar="FILE.jsonl", help="Arrivals and lengths of the open loop."
)
@click.option(
    "--context",
    "contexts",
    type=Counts(most=10_000_000),
    default=(),
    help="Hide needles in so many tokens: 4000,32000.",
)
@click.option("--slo", "slos", type=Slo(), multiple=True, help=f"An objective, NAME=MS: {', '.join(SLOS)}; repeatable.")
@click.option("--slo-share", type=click.FloatRange(0, 1), default=0.99, show_default=True, help="Requests to meet it.")
@click.option("--soak", type=click.IntRange(0, 1_000_000), default=0, metavar="N", help="N requests, a third given up.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of prompts and arrivals.")
@click.option(
    "--waivers", type=click.Path(path_type=Path), metavar="FILE", help="[default: waivers.toml if it is there]"
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="[default: reports/TIME]")
@click.option("--json", "as_json", is_flag=True, help="Print verdict.json on stdout and nothing else.")
@click.pass_context
def endpoint(ctx: click.Context, out: Path | None, as_json: bool, **given: Any) -> None:
    """Say whether the service at --url answers rightly, alone and under load, and how fast.

    Traffic goes to that address only, bounded by --budget. Without --reference its answers are held against its own.
    """
    from day0check import runner

    wanted = Wanted(**given)
    prepared = prepare(wanted)
    folder = out if out is not None else runner.default_out()
    ctx.meta[OUT_KEY] = folder
    runner.prepare_out(folder)
    tell = (lambda _: None) if as_json else (lambda part: click.echo(f"endpoint: {part}", err=True))
    try:
        with runner.terminate_as_interrupt():
            verdict = run_and_judge(wanted, prepared, folder, tell)
    except UsageError:
        with contextlib.suppress(OSError):  # nothing was judged: an empty folder may be given again
            (folder / "snapshots").rmdir()
            folder.rmdir()
        raise
    deliver(verdict, folder, as_json=as_json)


@dataclass(frozen=True)
class Prepared:
    """What the options mean: everything that can be refused is refused before anything is sent."""

    target: Any
    model: Model | None
    plan: Plan


def prepare(wanted: Wanted) -> Prepared:
    """Raises UsageError and InputError for names that mean nothing."""
    from day0check.contracts.profiles import profile_named
    from day0check.load.client import target_of

    profile_named(wanted.profile)
    key = None
    if wanted.api_key_env is not None:
        key = os.environ.get(wanted.api_key_env)
        if not key:
            raise UsageError(
                f"there is no variable {wanted.api_key_env}", where="--api-key-env", todo="export it, or name another"
            )
    target = target_of(wanted.url, key)
    if wanted.reference is None:
        return Prepared(target, None, plan_of(wanted, None))
    from day0check.cli.resolve import find_model

    model = find_model(wanted.reference)
    return Prepared(target, model, plan_of(wanted, model))


def run_and_judge(wanted: Wanted, prepared: Prepared, folder: Path, tell: Callable[[str], None]) -> Verdict:
    """Asks the endpoint, keeps the raw samples under `folder`, asks the reference, and decides."""
    from day0check import env, gate
    from day0check.checks.endpoint import CASE
    from day0check.cli.assemble import moment
    from day0check.service.inspect import ask

    allowed, waivers_file = waivers_of(wanted.waivers, on=today())
    begin, started = time.monotonic(), moment()
    asked = ask(prepared.target, prepared.plan, folder, tell)
    facts = {"url": prepared.target.base, "started": started, "parts": list(asked.observed.parts)}
    facts["waivers"] = str(waivers_file) if waivers_file else ""
    scene = gate.Scene(
        model=_model_record(asked.observed, prepared.model),
        profile=wanted.profile,
        cases=(CASE,),
        expected=tuple((CASE, name) for name in asked.expected),
        not_run=asked.not_run,
        environment={**env.capture(), RUN_FACTS: facts},
        measured={"endpoint": asked.measured, "seconds": time.monotonic() - begin},
        partial=bool(wanted.parts),
    )
    findings = [*(f for a in asked.answers for f in a.findings), *_unreferenced(prepared.model)]
    return gate.decide([a.outcome for a in asked.answers], findings, scene, waivers=allowed, today=today())


def parts_of(wanted: Wanted) -> tuple[str, ...]:
    """The parts in order: those named, else all; needles and soak when they have a number."""
    chosen = [p for p in PARTS if not wanted.parts or p in wanted.parts]
    for part, given in (("needle", wanted.contexts), ("soak", wanted.soak)):
        if given:
            chosen.insert(chosen.index("speed") if "speed" in chosen else len(chosen), part)
    return tuple(chosen)


def plan_of(wanted: Wanted, model: Model | None) -> Plan:
    """What the options ask for, as the service room takes it."""
    from day0check.load.client import Limits
    from day0check.load.scenario import Wish
    from day0check.load.speed import SpeedPlan
    from day0check.load.trace import read_trace
    from day0check.service.following import ends_of
    from day0check.service.inspect import Plan, Reference

    reference = None
    if model is not None:
        reference = Reference(model.directory, model.config, ends_of(model.directory, model.config))
    return Plan(
        Wish(
            model=wanted.served,
            parts=parts_of(wanted),
            seed=wanted.seed,
            soak=wanted.soak,
            contexts=wanted.contexts,
        ),
        limits=Limits(
            requests=5000 + wanted.soak, seconds=wanted.budget_s, request_s=wanted.time_limit_s, stall_s=wanted.stall_s
        ),
        speed=SpeedPlan(
            concurrencies=wanted.concurrency,
            requests=wanted.requests,
            arrivals="trace" if wanted.trace is not None else wanted.arrivals,
            trace=() if wanted.trace is None else read_trace(wanted.trace),
            rate_per_s=wanted.rate_per_s,
            seed=wanted.seed,
            slos=dict(wanted.slos),
        ),
        profile=wanted.profile,
        slo_share=wanted.slo_share,
        seed=wanted.seed,
        reference=reference,
    )


def _model_record(observed: Observed, model: Model | None) -> dict[str, Any]:
    from day0check.checks.endpoint.parameters import classify

    record: dict[str, Any] = {
        "name": observed.model or "unknown",
        "backend": "http",
        "device": "remote",
        "api": observed.api or "none",
        "parameters": {name: p.state for name, p in classify(observed).items()},
    }
    if model is not None:
        record["reference"] = {"name": model.name, "digest": model.digest}
    return record


def _unreferenced(model: Model | None) -> Iterator[Finding]:
    """Without a reference the page must say what was not looked at."""
    from day0check.checks.endpoint.answer import found

    if model is None:
        text = "no reference was given: the endpoint's answers were held against its own answers only"
        yield found("endpoint.oracle", "no reference", text, severity="note")
