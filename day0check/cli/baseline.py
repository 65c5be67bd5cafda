"""`day0check baseline record NAME [RUN_DIR…]`: keeps what a run measured, to compare later runs with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from day0check.cli.assemble import moment
from day0check.cli.options import run_folder
from day0check.errors import UsageError
from day0check.gate import read_verdict

if TYPE_CHECKING:
    from day0check.baseline import Entry

MOST_WAITING = 0.15


@click.group()
def baseline() -> None:
    """Recorded baselines: the numbers, choices, times and memory of a run under its key."""


@baseline.command()
@click.argument("name")
@click.argument("run_dir", nargs=-1, type=click.Path(path_type=Path))
@click.option("--baselines", type=click.Path(path_type=Path), default="baselines", show_default=True, metavar="DIR")
@click.option("--replace", "reason", metavar="REASON", help="Record anew what is there already, and say why.")
def record(name: str, run_dir: tuple[Path, ...], baselines: Path, reason: str | None) -> None:
    """Record the run in RUN_DIR (the newest in reports/ when none is given) as baseline NAME.

    Several runs of the same thing make a better baseline: what differs among them is not held against a later run.
    """
    from day0check.baseline import collect
    from day0check.baseline import record as keep

    folders = [run_folder(given) for given in run_dir] or [newest_run(Path("reports"))]
    if reason is not None and not reason.strip():
        raise UsageError("the reason is empty", where="--replace", todo="say why the baseline is recorded anew")
    runs = []
    for folder in folders:
        verdict = read_verdict(folder / "verdict.json")
        if verdict.status == "error":
            raise UsageError("this run ended with an error of the harness", where=str(folder), todo="run again")
        if verdict.status != "ready":
            click.echo(f"note: the run in {folder} is {verdict.status}, not ready", err=True)
        runs.append(collect(folder, verdict))
    for told in busy(runs):
        click.echo(told, err=True)
    for path in keep(runs, baselines, name, at=moment(), reason=reason):
        click.echo(str(path))


def busy(runs: list[dict[str, Entry]]) -> list[str]:
    """A note when the processor was given to others for a good part of the recorded steps."""
    steps = [step for run in runs for entry in run.values() for times in entry.runs for step in times.steps]
    total = sum(step.seconds for step in steps)
    share = sum(step.waited_seconds for step in steps) / total if total else 0.0
    if share <= MOST_WAITING:
        return []
    return [f"note: other work took the processor for {share:.0%} of the time; a slowdown of this size may hide in it"]


def newest_run(root: Path) -> Path:
    """The newest run under `root`. Raises UsageError when there is none."""
    runs = [path.parent for path in root.glob("*/verdict.json")]
    if not runs:
        raise UsageError("there is no run", where=str(root), todo="`day0check run` makes one, or give RUN_DIR")
    return max(runs, key=lambda run: (run / "verdict.json").stat().st_mtime)
