"""The raw samples as JSON Lines: every exchange with its text, every request of the load with its times."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from day0check.errors import Day0Error
from day0check.load.records import Exchange
from day0check.load.speed import Phase
from day0check.types import to_json

_LONGEST = 4096


def exchange_line(exchange: Exchange) -> dict[str, Any]:
    """One exchange: what was asked, each read with its time in ms since it was sent, and what the answer says."""
    reply = exchange.reply
    return {
        "label": exchange.label,
        "path": exchange.path,
        "asked": _cut(exchange.asked),
        "status": reply.status,
        "fault": reply.fault,
        "detail": reply.detail,
        "streamed": reply.streamed,
        "seconds": (reply.end_ns - reply.sent_ns) / 1e9,
        "reads": [[round((at - reply.sent_ns) / 1e6, 3), _bytes(data)] for at, data in reply.reads],
        "answer": to_json(exchange.answer),
    }


def sample_lines(phase: Phase) -> Iterable[dict[str, Any]]:
    """The requests of a phase; times of reads in ms since the phase began."""
    begin = phase.load.begin_ns
    for number, (reply, sample) in enumerate(zip(phase.load.replies, phase.samples, strict=False)):
        yield {
            "phase": phase.name,
            "request": number,
            "scheduled_ms": (reply.scheduled_ns - begin) / 1e6,
            "sent_ms": (reply.sent_ns - begin) / 1e6,
            "end_ms": (reply.end_ns - begin) / 1e6,
            "status": reply.status,
            "read_ms": [round((at - begin) / 1e6, 3) for at, _ in reply.reads],
            **to_json(sample),
        }


class Keeper:
    """Appends what was seen to `exchanges.jsonl` and `samples.jsonl` of a folder as it comes: what ends a run early
    takes nothing with it. Raises Day0Error when the disk does not take it."""

    def __init__(self, folder: Path) -> None:
        self._exchanges, self._samples = folder / "exchanges.jsonl", folder / "samples.jsonl"
        self._kept = 0

    def exchanges(self, every: Sequence[Exchange]) -> None:
        """`every`: all exchanges so far; those that were not there the last time are written."""
        new, self._kept = every[self._kept :], len(every)
        if new:
            _append(self._exchanges, (exchange_line(e) for e in new))

    def phase(self, phase: Phase) -> None:
        _append(self._samples, sample_lines(phase))


def _append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """One JSON object a line, all of them or the error that says why not."""
    lines = [json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n" for row in rows]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(lines)
    except OSError as cause:
        raise Day0Error(
            f"cannot be written: {cause.strerror}", where=str(path), todo="make room, or choose another --out"
        ) from cause


def _bytes(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "base64:" + base64.b64encode(data).decode()


def _cut(value: Any) -> Any:
    """Long texts (images) are cut: they can be made again from the seed."""
    if isinstance(value, dict):
        return {k: _cut(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_cut(v) for v in value]
    if isinstance(value, str) and len(value) > _LONGEST:
        return value[:_LONGEST] + f"… ({len(value)} characters)"
    return value
