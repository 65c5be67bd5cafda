"""`day0check` as a user starts it: a process of its own, its exit code, what it prints and the verdict it leaves."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Ended:
    """How a command ended. `verdict` is the content of verdict.json, empty when none was written."""

    code: int
    stdout: str
    stderr: str
    verdict: dict[str, Any]

    @property
    def first(self) -> dict[str, Any]:
        return self.verdict.get("first_fault") or {}

    def of_case(self, case: str) -> list[dict[str, Any]]:
        """The findings of one case."""
        return [f for f in self.verdict["findings"] if f["evidence"]["case"] == case]


def command(*arguments: str, cwd: Path, limit_s: float = 240) -> Ended:
    """Runs `day0check ARGUMENTS` in `cwd` as a process of its own; a run writes into `out` there."""
    ended = subprocess.run(
        [sys.executable, "-m", "day0check.cli", *_with_out(arguments, cwd)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr, _verdict(cwd))


def command_here(*arguments: str, cwd: Path) -> Ended:
    """The same inside this process: for commands that end before anything is started."""
    from day0check.cli.app import cli

    with contextlib.chdir(cwd):
        ended = CliRunner().invoke(cli, _with_out(arguments, cwd))
    if ended.exc_info is not None and not isinstance(ended.exception, SystemExit | None):
        raise ended.exception
    return Ended(ended.exit_code, ended.stdout, ended.stderr, _verdict(cwd))


def _with_out(arguments: tuple[str, ...], cwd: Path) -> tuple[str, ...]:
    return (*arguments, "--out", str(cwd / "out")) if arguments[0] == "run" else arguments


def _verdict(cwd: Path) -> dict[str, Any]:
    path = cwd / "out" / "verdict.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def case_file(name: str) -> str:
    return str(HERE / "cases" / f"{name}.toml")


def operators_file(name: str) -> str:
    return str(HERE / "operators" / f"{name}.py")
