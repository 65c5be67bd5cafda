"""Arrivals from a recorded trace: JSON Lines as Mooncake publishes them, or of seconds.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52}      milliseconds since the trace began
    {"at_s": 27.482, "input_length": 6955}                               seconds; the lengths are optional

Only times and lengths are used: what was asked is nowhere in such a trace.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from day0check.errors import InputError

MOST_LINES = 1_000_000


@dataclass(frozen=True)
class Due:
    """One request: seconds since the first, and its lengths in tokens where the trace gives them."""

    at_s: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def read_trace(path: Path) -> tuple[Due, ...]:
    """The requests of a trace in the order of their times, the first at 0. Raises InputError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(str(error), where=str(path), todo="give a trace of JSON Lines") from error
    if len(lines) > MOST_LINES:
        raise InputError(f"has more than {MOST_LINES} lines", where=str(path), todo="cut the trace")
    found = [_due(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError("holds no request", where=str(path), todo="give a trace of JSON Lines")
    found.sort(key=lambda due: due.at_s)
    return tuple(Due(due.at_s - found[0].at_s, due.prompt_tokens, due.output_tokens) for due in found)


def _due(line: str, where: str) -> Due:
    todo = 'write {"timestamp": MILLISECONDS} or {"at_s": SECONDS}, with input_length and output_length if known'
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"is no JSON: {error}", where=where, todo=todo) from error
    if not isinstance(row, dict) or ("timestamp" in row) == ("at_s" in row):
        raise InputError("has no time, or two", where=where, todo=todo)
    at = row["timestamp"] if "timestamp" in row else row["at_s"]
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not math.isfinite(at) or at < 0:
        raise InputError(f"the time is {at!r}", where=where, todo=todo)
    lengths = [_length(row.get(key), key, where) for key in ("input_length", "output_length")]
    return Due(at / 1000 if "timestamp" in row else float(at), *lengths)


def _length(value: Any, key: str, where: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{key} is {value!r}", where=where, todo="give a number of tokens, or leave it out")
    return value
