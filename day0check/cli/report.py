"""`day0check report DIR`: the views of a run again, from its verdict.json alone."""

from __future__ import annotations

from pathlib import Path

import click

from day0check.cli.options import run_folder
from day0check.gate import read_verdict, render


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print verdict.json on stdout and nothing else.")
def report(run_dir: Path, as_json: bool) -> None:
    """Make report.html, junit.xml, summary.md and tables/ of the run in RUN_DIR again.

    Exit code 0 when they were made, whatever the verdict: `gate` is the command that decides.
    """
    from day0check.report.console import console, show
    from day0check.report.write import write_views

    folder = run_folder(run_dir)
    verdict = read_verdict(folder / "verdict.json")
    if as_json:
        click.echo(render(verdict), nl=False)
    else:
        show(verdict, console())
    for path in write_views(verdict, folder):
        click.echo(str(path), err=True)
