"""The exceptions of day0check and the exit codes they own.

    Day0Error                     exit 3   the harness itself is at fault
    ├── UsageError                exit 2   an argument, option or name that means nothing
    │   └── NothingSelected       exit 5   a selection that selects nothing
    ├── InputError                exit 2   a file the user gave that cannot be read as what it should be
    ├── Unavailable               exit 4   what was asked for cannot run here; the checks that need it are not run
    └── CaptureError              exit 3   the recorder failed its own check

Every message says what, where (file, key, tensor) and what to do. Standard library only.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command; the strongest of several is given by `strongest`."""

    READY = 0
    NOT_READY = 1
    USAGE = 2
    HARNESS = 3
    INCONCLUSIVE = 4
    NOTHING_SELECTED = 5


_STRENGTH = (
    ExitCode.HARNESS,
    ExitCode.USAGE,
    ExitCode.NOT_READY,
    ExitCode.INCONCLUSIVE,
    ExitCode.NOTHING_SELECTED,
    ExitCode.READY,
)


def strongest(*codes: ExitCode) -> ExitCode:
    """The code that wins when several apply: 3 > 2 > 1 > 4 > 5 > 0; READY when none is given."""
    return min(codes, key=_STRENGTH.index, default=ExitCode.READY)


class Day0Error(Exception):
    """Base of all our errors: `what` happened, `where`, and what `todo`; `operator`: the one that raised it, if any."""

    exit_code = ExitCode.HARNESS

    def __init__(self, what: str, *, where: str = "", todo: str = "", operator: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.todo, self.operator = what, where, todo, operator

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head}\n  {self.todo}" if self.todo else head


class UsageError(Day0Error):
    exit_code = ExitCode.USAGE


class NothingSelected(UsageError):
    exit_code = ExitCode.NOTHING_SELECTED


class InputError(Day0Error):
    exit_code = ExitCode.USAGE


class Unavailable(Day0Error):
    exit_code = ExitCode.INCONCLUSIVE


class CaptureError(Day0Error):
    exit_code = ExitCode.HARNESS
