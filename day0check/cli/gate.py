"""`day0check gate RUN_DIR --baseline NAME`: a finished run against a recorded baseline; the exit code is the answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from day0check.cli.options import RUN_FACTS, deliver, run_folder, today, waivers_of
from day0check.gate import BASELINE, Scene, decide, read_verdict
from day0check.types import Verdict
from day0check.waivers import CHECK as WAIVERS


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--baseline", "name", metavar="NAME", help="The baseline to compare with.")
@click.option("--baselines", type=click.Path(path_type=Path), default="baselines", show_default=True, metavar="DIR")
@click.option(
    "--waivers", type=click.Path(path_type=Path), metavar="FILE", help="[default: waivers.toml if it is there]"
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="[default: RUN_DIR/gate/NAME]")
@click.option("--json", "as_json", is_flag=True, help="Print verdict.json on stdout and nothing else.")
def gate(
    run_dir: Path, name: str | None, baselines: Path, waivers: Path | None, out: Path | None, as_json: bool
) -> None:
    """Decide on the run in RUN_DIR again: with a baseline, with waivers, or both. The run itself is left as it is."""
    folder = run_folder(run_dir)
    before = read_verdict(folder / "verdict.json")
    allowed, file = waivers_of(waivers, on=today())
    verdict = again(before, folder, name=name, baselines=baselines)
    verdict = decide(*verdict[:2], _with_waivers(verdict[2], file), waivers=allowed, today=today())
    deliver(verdict, out if out is not None else folder / "gate" / (name or "waivers"), as_json=as_json)


def again(before: Verdict, folder: Path, *, name: str | None, baselines: Path) -> tuple[tuple, tuple, Scene]:
    """Outcomes, findings and scene of a stored verdict, what an earlier gate added taken out, the baseline compared."""
    outcomes = tuple(o for o in before.checks if not o.name.startswith(BASELINE))
    findings = tuple(
        replace(f, waived=False) for f in before.findings if f.check != WAIVERS and not f.check.startswith(BASELINE)
    )
    answered = {f"{o.name} of {o.case}" if o.case else o.name for o in before.checks}
    left_out = tuple(n for n in before.not_run if n.check not in answered and not n.check.startswith(BASELINE))
    scene = Scene(
        model=before.model,
        profile=before.profile,
        cases=before.cases,
        not_run=left_out,
        drift=before.drift,
        choices=before.choices,
        operators=before.operators,
        environment=before.environment,
        measured={k: v for k, v in before.measured.items() if k != "baseline"},
        partial=bool(before.environment.get(RUN_FACTS, {}).get("selectors")),
    )
    if name is None:
        return outcomes, findings, scene
    return compared(outcomes, findings, scene, folder, name=name, baselines=baselines)


def compared(
    outcomes: tuple, findings: tuple, scene: Scene, folder: Path, *, name: str, baselines: Path
) -> tuple[tuple, tuple, Scene]:
    """The same with the comparison against baseline `name` added. Raises UsageError, InputError as reading it does."""
    from day0check import env
    from day0check.baseline import collect, read_baseline
    from day0check.baseline_compare import compare_run

    baseline = read_baseline(baselines, name)
    run = collect(folder, scene)
    changes: dict[str, None] = {}
    for entry in baseline.entries:
        if entry.case in run:
            told = env.difference(_machine(entry.recorded.get("environment", {})), _machine(scene.environment))
            changes |= dict.fromkeys(str(change) for change in told)
    comparison = compare_run(baseline, run, changes=tuple(changes), partial=scene.partial)
    return (*outcomes, *comparison.outcomes), (*findings, *comparison.findings), comparison.into(scene)


def _machine(environment: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in environment.items() if key != RUN_FACTS}


def _with_waivers(scene: Scene, file: Path | None) -> Scene:
    facts = {**scene.environment.get(RUN_FACTS, {}), "waivers": str(file) if file else ""}
    return replace(scene, environment={**scene.environment, RUN_FACTS: facts})
