"""The group of commands: loads each on demand, renders every error as one message, owns the exit code."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

import click

import day0check
from day0check.errors import Day0Error, ExitCode

# name -> (module:function, the line that --help shows)
COMMANDS = {
    "run": ("day0check.cli.run:run", "Run cases beside the reference and say whether the stack is ready."),
    "endpoint": ("day0check.cli.endpoint:endpoint", "Check and measure a live OpenAI-compatible endpoint."),
    "gate": ("day0check.cli.gate:gate", "Compare a finished run with a recorded baseline."),
    "baseline": ("day0check.cli.baseline:baseline", "Record the numbers and times of a run as a baseline."),
    "weights": ("day0check.cli.weights:weights", "Audit a checkpoint: files, names, shapes, dtypes, scales, keys."),
    "plan": ("day0check.cli.plan:plan", "Count a model's parameters, weights, caches and workspaces, without weights."),
    "report": ("day0check.cli.report:report", "Make the page and the other views of a run again."),
    "selftest": (
        "day0check.cli.selftest:selftest",
        "Run known faults and legal variants: are they caught, and placed?",
    ),
    "repro": (
        "day0check.cli.repro:repro",
        "Repeat the failing calls of a run, with the recorded results or an operator.",
    ),
    "serve": ("day0check.cli.serve:serve", "Answer OpenAI-compatible requests with the accelerated engine."),
    "list": ("day0check.cli.listing:list_", "List cases, operators, presets, checks, profiles or backends."),
}
INTERRUPTED = 130  # as shells say it: 128 + SIGINT
OUT_KEY = "day0check.out"  # in the context's meta: where a traceback of ours goes


class Commands(click.Group):
    """Commands are imported when they are used. What is raised inside becomes one message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, function = COMMANDS[name][0].split(":")
        return getattr(importlib.import_module(module), function)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(COMMANDS)}"
            raise click.UsageError(f"there is no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except Day0Error as error:
            from day0check.cli.options import is_interruption

            refuse(str(error), INTERRUPTED if is_interruption(error) else error.exit_code)
        except (click.exceptions.Exit, click.ClickException):
            raise
        except (KeyboardInterrupt, click.Abort):
            out = ctx.meta.get(OUT_KEY)
            where = f" in {out}" if out is not None and out.is_dir() else ""
            refuse(f"interrupted; what was recorded until then is kept{where}", INTERRUPTED)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of our output went away
            ctx.exit(ExitCode.HARNESS)
        except Exception as error:
            file = _keep_traceback(ctx.meta.get(OUT_KEY))
            refuse(
                f"a fault of day0check itself: {type(error).__name__}: {error}\n  the traceback is in {file}",
                ExitCode.HARNESS,
            )


def refuse(message: str, code: int) -> NoReturn:
    """One message on stderr, and the exit code."""
    click.echo(f"day0check: {message}", err=True)
    raise click.exceptions.Exit(int(code))


def _keep_traceback(out: Path | None) -> Path:
    folder = out if out is not None and out.is_dir() else Path(tempfile.mkdtemp(prefix="day0check-"))
    file = folder / "traceback.txt"
    try:
        file.write_text(traceback.format_exc(), encoding="utf-8", errors="backslashreplace")
    except OSError:  # a full disk must not hide what happened
        traceback.print_exc()
    return file


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(day0check.__version__, prog_name="day0check")
def cli() -> None:
    """Is this stack ready for this model? If not, which operator, layer, phase and token is wrong?

    Exit codes: 0 ready, 1 not ready, 2 usage or unreadable input, 3 a fault of day0check itself, 4 inconclusive,
    5 nothing selected.
    """


def main() -> NoReturn:
    """The entry point of the console script."""
    cli.main(prog_name="day0check")
    raise AssertionError("click ends the process")
