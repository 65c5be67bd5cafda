"""`day0check repro DIR`: the failing calls of a run again, without the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from day0check.errors import UsageError


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="DIR")
@click.option("--with", "function", metavar="FILE.py:FUNCTION", help="Call this with the recorded arguments.")
@click.option("--device", default="cpu", show_default=True, help="Where it is called.")
@click.pass_context
def repro(ctx: click.Context, folder: Path, function: str | None, device: str) -> None:
    """Compare the failing calls in DIR (a run, or one folder under its repro/) with what is right.

    Exit code 1 when one is beyond its limits, 0 when none is: the recorded result, or that of an operator of yours.
    """
    scripts = find_scripts(folder)
    if function is not None:
        file, colon, name = function.rpartition(":")
        if not colon or not name.isidentifier() or not Path(file).is_file():
            raise UsageError("there is no such function", where=f"--with {function}", todo="give FILE.py:FUNCTION")
        function = f"{Path(file).resolve()}:{name}"
    codes = []
    for script in scripts:
        click.echo(f"{script.parent}:")
        command = [sys.executable, str(script), *([function, device] if function else [])]
        codes.append(subprocess.run(command, check=False).returncode)
    ctx.exit(max(min(code, 1) if code >= 0 else 1 for code in codes))


def find_scripts(folder: Path) -> list[Path]:
    """The reproducers of a run, or the one in a folder. Raises UsageError when there is none."""
    if not folder.is_dir():
        raise UsageError("there is no such folder", where=str(folder), todo="give the --out folder of a run")
    found = [folder / "repro.py"] if (folder / "repro.py").is_file() else sorted(folder.glob("repro/*/repro.py"))
    if found:
        return found
    issues = sorted(folder.glob("repro/*/issue.md"))
    todo = f"see {issues[0]}" if issues else "a run leaves one when it found a failing operator"
    raise UsageError("there is no reproducer here", where=str(folder), todo=todo)
