"""`day0check run`: the main job. Names are resolved, the candidate and the reference run, the gate decides."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from day0check.cli.app import OUT_KEY
from day0check.cli.options import RUN_FACTS, Duration, deliver, today, waivers_of
from day0check.errors import UsageError
from day0check.types import NotRun

if TYPE_CHECKING:
    from day0check.cli.resolve import Model
    from day0check.plan import Plan
    from day0check.runner import RunPlan
    from day0check.types import RunCase, Verdict

Left = tuple[NotRun, ...]


@dataclass(frozen=True)
class Wish:
    """What the user asked for, as given."""

    selectors: tuple[str, ...]
    model: str
    backend: str
    ops: str | None
    device: str
    profile: str
    stage: str | None
    baseline: str | None
    baselines: Path
    waivers: Path | None
    budget_s: float | None
    time_limit_s: float | None
    tp: int = 1
    ep: int = 1
    sums: str = "all_reduce"
    scheduler: str | None = None  # of the server, in service cases
    further_layout: dict[str, Any] = field(default_factory=dict)  # of a known fault that needs more than the two

    @property
    def layout(self) -> dict[str, Any]:
        """The layout as a plan has it; empty for one device."""
        cut = self.tp > 1 or self.ep > 1
        return {**self.further_layout, **self.layout_named()} if cut else {}

    def layout_named(self) -> dict[str, Any]:
        """The layout as a verdict names it; how sums are taken only where it is not the usual way."""
        named: dict[str, Any] = {"tensor_parallel": self.tp, "expert_parallel": self.ep}
        return named if self.sums == "all_reduce" else {**named, "sums": self.sums}


@click.command()
@click.argument("case", nargs=-1)
@click.option("--model", default="tiny", show_default=True, metavar="PRESET|DIR", help="What to run.")
@click.option("--backend", default="accelerated", show_default=True, metavar="NAME|FILE.py:NAME", help="How to run it.")
@click.option("--ops", metavar="FILE.py", help="Operators that replace those of the backend.")
@click.option("--fault", metavar="ID", help="Lay this known fault over the backend, on its own model and case.")
@click.option(
    "--tp", type=int, default=1, show_default=True, metavar="N", help="Ranks that heads and columns are cut over."
)
@click.option(
    "--sums",
    type=click.Choice(["all_reduce", "reduce_scatter"]),
    default="all_reduce",
    show_default=True,
    help="Where the sums of --tp go: to every rank, or each row's to one (sequence parallel).",
)
@click.option("--ep", type=int, default=1, show_default=True, metavar="N", help="Ranks that experts are laid over.")
@click.option("--device", default="cpu", show_default=True, help="Where the candidate runs, as torch names it.")
@click.option(
    "--profile",
    default="bf16",
    show_default=True,
    metavar="NAME|FILE.toml",
    help="The precision that the candidate claims.",
)
@click.option("--stage", metavar="smoke|t-minus|t0|t1", help="Which cases; t0 when no CASE is given.")
@click.option("--baseline", metavar="NAME", help="Compare with this recorded baseline, too.")
@click.option("--baselines", type=click.Path(path_type=Path), default="baselines", show_default=True, metavar="DIR")
@click.option(
    "--waivers", type=click.Path(path_type=Path), metavar="FILE", help="[default: waivers.toml if it is there]"
)
@click.option("--budget", type=Duration(), metavar="TIME", help="Leave out, and name, what does not fit (10m, 90s).")
@click.option(
    "--time-limit",
    type=Duration(),
    metavar="TIME",
    help="Of every case, instead of its own; watching it does not count.",
)
@click.option("--compile", "compiled", is_flag=True, help="The embedded engine, its operators by torch.compile.")
@click.option("--dry-run", is_flag=True, help="Print the plan: runs, bytes, memory, minutes. Run nothing.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="[default: reports/TIME]")
@click.option("--json", "as_json", is_flag=True, help="Print verdict.json on stdout and nothing else.")
@click.pass_context
def run(
    ctx: click.Context,
    case: tuple[str, ...],
    out: Path | None,
    dry_run: bool,
    as_json: bool,
    fault: str | None,
    compiled: bool,
    **given: Any,
) -> None:
    """Run CASEs (all of the stage when none is given) beside the reference and say whether the stack is ready.

    A CASE is an id, the leading part of one ("text", "text/one_turn", "operators") or the path of a .toml file.
    """
    from day0check import runner
    from day0check.report.console import console

    if compiled:
        given["backend"] = compiled_backend(given["backend"])
    wish = Wish(
        selectors=case,
        budget_s=given.pop("budget"),
        time_limit_s=given.pop("time_limit"),
        **given,
    )
    if fault is not None:
        wish = with_fault(wish, fault, given=frozenset(k for k in given if is_given(ctx, k)))
    model, cases = prepare(wish)
    plan, cases, left_out = planned(wish, model, cases)
    if dry_run:
        click.echo(plan.text())
        for item in left_out:
            click.echo(f"left out: {item.check}: {item.reason}")
        return
    if console().is_terminal:
        click.echo(plan.text(), err=True)
    folder = out if out is not None else runner.default_out()
    ctx.meta[OUT_KEY] = folder
    verdict = run_and_judge(wish, model, cases, folder, left_out=left_out)
    reproduce(wish, model, cases, folder, verdict)
    deliver(verdict, folder, as_json=as_json)


def compiled_backend(name: str) -> str:
    """The backend that `--compile` means. Raises UsageError for one of which we know no compiled form."""
    if name not in ("accelerated", "compiled"):
        raise UsageError(f"there is no compiled form of {name}", where="--compile", todo="leave out one of the two")
    return "compiled"


def is_given(ctx: click.Context, name: str) -> bool:
    """Whether the user wrote this option, or it has its default."""
    return ctx.get_parameter_source(name) not in (None, click.core.ParameterSource.DEFAULT)


def with_fault(wish: Wish, fault: str, *, given: frozenset[str]) -> Wish:
    """The wish with a known fault laid over; model, profile and case are those in which it shows, unless `given`.

    Raises UsageError for an unknown fault, and for options that a fault brings itself.
    """
    from day0check.faults.catalogue import select

    (located,) = select((fault,))
    for option in sorted({"ops", "backend"} & given):
        todo = f"a fault brings its own candidate: leave --{option} or --fault out"
        raise UsageError(f"--fault and --{option} exclude each other", where=f"--fault {fault}", todo=todo)
    entry = located.entry
    return replace(
        wish,
        ops=located.ops,
        scheduler=located.scheduler,
        backend="accelerated" if located.service else located.backend,
        model=wish.model if "model" in given else entry.model,
        profile=wish.profile if "profile" in given else entry.profile,
        selectors=wish.selectors or (located.case,),
        tp=wish.tp if "tp" in given else entry.layout.get("tensor_parallel", 1),
        ep=wish.ep if "ep" in given else entry.layout.get("expert_parallel", 1),
        sums=wish.sums if "sums" in given else entry.layout.get("sums", "all_reduce"),
        further_layout={key: value for key, value in entry.layout.items() if key != "sums"},
    )


def prepare(wish: Wish) -> tuple[Model, tuple[RunCase, ...]]:
    """Resolves every name before anything is started. Raises UsageError, InputError, NothingSelected."""
    from day0check.accelerated.parallel.layout import layout_of
    from day0check.backends import loader
    from day0check.case import load_cases
    from day0check.cli.resolve import check_device, find_model
    from day0check.cli.service import servable
    from day0check.contracts.profiles import profile_named

    profile_named(wish.profile)
    layout_of(wish.layout_named())
    loader.parse(wish.backend)
    if wish.ops is not None:
        loader.check_operators_file(wish.ops)
    model = find_model(wish.model)
    check_device(wish.device)
    cases = load_cases(wish.selectors, config=model.config, model=wish.model, stage=wish.stage, profile=wish.profile)
    cases = servable(cases, backend=wish.backend, one_device=not wish.layout, selectors=wish.selectors)
    if wish.time_limit_s is not None:
        cases = tuple(replace(case, time_limit_s=wish.time_limit_s) for case in cases)
    elif wish.device.startswith("cpu") and max(wish.tp, wish.ep) > 1:  # ranks that share the cores of one machine
        cases = tuple(replace(case, time_limit_s=case.time_limit_s * max(wish.tp, wish.ep)) for case in cases)
    return model, cases


def run_and_judge(
    wish: Wish, model: Model, cases: tuple[RunCase, ...], folder: Path, *, left_out: tuple[NotRun, ...] = ()
) -> Verdict:
    """Runs the cases and decides. Raises what `runner.run` raises; nothing is decided then."""
    from day0check import env, gate, runner
    from day0check.audit import inspect
    from day0check.baseline import read_baseline
    from day0check.cli.assemble import judge, moment
    from day0check.cli.gate import compared
    from day0check.cli.progress import progress
    from day0check.cli.service import split, with_service
    from day0check.service.cases import Served

    waivers, waivers_file = waivers_of(wish.waivers, on=today())
    if wish.baseline is not None:
        read_baseline(wish.baselines, wish.baseline)  # a damaged one is told now, not after minutes of running
    begin = time.monotonic()
    environment = env.capture()
    asked = {
        "selectors": list(wish.selectors),
        "stage": wish.stage or ("" if wish.selectors else "t0"),
        "waivers": str(waivers_file) if waivers_file else "",
        "started": moment(),
    }
    engine_cases, service_cases = split(cases)
    plan = plan_of(wish, model, engine_cases, folder)
    audited = inspect(model.directory)
    if engine_cases:
        with progress(len(engine_cases)) as tell:
            results = runner.run(plan, tell)
    else:
        runner.prepare_out(folder)
        results = []
    judged = judge(
        results,
        folder,
        config=model.config,
        model=model_record(wish, model),
        profile=wish.profile,
        environment={**env.with_told(environment, folder), RUN_FACTS: asked},
        not_run=left_out,
        partial=bool(wish.selectors),
        audited=audited,
    )
    served = Served(
        model.directory, model.name, model.config, wish.profile, wish.device, ops=wish.ops, scheduler=wish.scheduler
    )
    judged = with_service(judged, service_cases, served, folder)
    scene = replace(judged.scene, measured={**judged.scene.measured, "seconds": time.monotonic() - begin})
    answered = (judged.outcomes, judged.findings, scene)
    if wish.baseline is not None:
        answered = compared(*answered, folder, name=wish.baseline, baselines=wish.baselines)
    return gate.decide(*answered, waivers=waivers, today=today())


def reproduce(wish: Wish, model: Model, cases: tuple[RunCase, ...], folder: Path, verdict: Verdict) -> None:
    """Leaves a reproducer of the first fault under `folder`, or an issue that says why there is none."""
    from day0check.repro.run import reproduce_finding

    first = verdict.first_fault
    case = first and next((c for c in cases if c.id == first.evidence.get("case")), None)
    if verdict.status != "not_ready" or case is None or case.id.startswith("service/"):
        return
    facts = {"backend": wish.backend, "device": wish.device, "profile": wish.profile, "model": wish.model}
    facts |= {k: str(verdict.environment.get(k, {}).get("version", "unknown")) for k in ("torch", "python")}
    plan = plan_of(wish, model, (case,), folder)
    reproduce_finding(first, plan, folder / "repro" / first.id, facts)


def plan_of(wish: Wish, model: Model, cases: tuple[RunCase, ...], out: Path) -> RunPlan:
    """How the runner runs these cases as the user wishes."""
    from day0check import runner

    return runner.RunPlan(
        cases=cases,
        out=out,
        model_dir=str(model.directory),
        backend=wish.backend,
        profile=wish.profile,
        device=wish.device,
        ops=wish.ops,
        layout=wish.layout,
    )


def model_record(wish: Wish, model: Model) -> dict[str, Any]:
    """What stands under `model` in the verdict."""
    import hashlib

    record: dict[str, Any] = {
        "name": model.name,
        "digest": model.digest,
        "layers": len(model.config.layers),
        "backend": wish.backend.rpartition("/")[2],
        "device": wish.device,
        "layout": wish.layout_named(),
    }
    if wish.ops is not None:
        file = Path(wish.ops)
        record["ops"] = {"file": file.name, "digest": hashlib.sha256(file.read_bytes()).hexdigest()[:12]}
    return record


def planned(wish: Wish, model: Model, cases: tuple[RunCase, ...]) -> tuple[Plan, tuple[RunCase, ...], Left]:
    """The plan of all cases, those that fit the budget, and the others, named. Raises UsageError when none fits."""
    from day0check.plan import duration, make_plan

    ranks = max(wish.tp, wish.ep)
    plan = make_plan(model.config, cases, wish.profile, wish.device, model_dir=model.directory, ranks=ranks)
    if wish.budget_s is None:
        return plan, cases, ()
    fitting, left_out = plan.within(wish.budget_s)
    if not fitting:
        what = f"not even case {cases[0].id} fits {duration(wish.budget_s)}"
        raise UsageError(what, where="--budget", todo="give more time; --dry-run prints the plan")
    return plan, tuple(case for case in cases if case.id in fitting), left_out
