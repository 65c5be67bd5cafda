"""What several commands share: durations, the waivers file, and where the verdict of a command goes."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

import click

from day0check.errors import UsageError
from day0check.gate import exit_code, render, write_verdict
from day0check.types import Verdict
from day0check.waivers import Waiver, read_waivers

WAIVERS_FILE = "waivers.toml"
RUN_FACTS = "run"  # key in the environment of what was asked and when: no fact of the machine
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType):
    """Seconds from `90`, `90s`, `10m` or `1.5h`."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", str(value).strip())
        seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
        if seconds <= 0:
            self.fail(f"{value!r} is no duration above zero: write 90s, 10m or 1.5h", param, ctx)
        return seconds


class Bytes(click.ParamType):
    """Bytes from `4096`, `512M`, `8G` or `1.5T`; the letters count in powers of 1024."""

    name = "bytes"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", str(value).strip())
        size = int(float(match[1]) * 1024 ** " KMGT".index(match[2] or " ")) if match else 0
        if size <= 0:
            self.fail(f"{value!r} is no number of bytes above zero: write 4096, 512M or 8G", param, ctx)
        return size


def today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def waivers_of(given: Path | None, *, on: datetime.date) -> tuple[tuple[Waiver, ...], Path | None]:
    """The waivers in use and their file: the one given, else `waivers.toml` of the working directory if it is there."""
    path = given if given is not None else Path(WAIVERS_FILE)
    if given is None and not path.is_file():
        return (), None
    return read_waivers(path, today=on), path


def deliver(verdict: Verdict, folder: Path, *, as_json: bool) -> None:
    """Writes verdict.json first, then the views, shows the verdict, and ends with its exit code."""
    write_verdict(verdict, folder / "verdict.json")
    if as_json:
        click.echo(render(verdict), nl=False)
    from day0check.report.console import console, show
    from day0check.report.write import append_step_summary, write_views

    show(verdict, console(), folder=str(folder))
    write_views(verdict, folder)
    append_step_summary(verdict)
    raise click.exceptions.Exit(int(exit_code(verdict)))


def is_interruption(error: Exception) -> bool:
    """Whether the user ended a run: that is no fault of the harness, and has the code that shells give it."""
    runner = sys.modules.get("day0check.runner")
    return runner is not None and isinstance(error, runner.Interrupted)


def run_folder(given: Path) -> Path:
    """The folder of a finished run. Raises UsageError when it is none."""
    if not given.is_dir():
        raise UsageError("there is no such folder", where=str(given), todo="give the --out folder of a run")
    if not (given / "verdict.json").is_file():
        todo = "give the --out folder of a run that ended with a verdict"
        raise UsageError("the folder has no verdict.json", where=str(given), todo=todo)
    return given
