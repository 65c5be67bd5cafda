"""What the runner tells a worker, what a worker says while it runs, and the record of how a case ended. No torch."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from day0check.errors import Day0Error, ExitCode, InputError, UsageError
from day0check.probe.heartbeat import read as read_heartbeat
from day0check.probe.records import replace_json
from day0check.snapshot import case_directory
from day0check.types import RunCase, from_json, to_json

RunStatus = Literal["finished", "failed", "aborted", "timeout", "memory", "unavailable"]


@dataclass(frozen=True)
class Job:
    """The work of one worker. Cases run in order; a reference worker waits for each case's id on its standard input.

    `events`: the file of JSON lines in which the worker says where it is. `byte_cap`: bytes of captured tensors a case.
    `repeats`: unobserved runs of each case after the observed one, for its times. `parent`: the runner's process id;
    the worker ends with it (0: it does not). `witness`: the one call to keep whole, as `probe.witness.Witness` takes
    it, in place of everything else. `gated`: one rank of several, which waits for each case's id like a reference.
    """

    role: Literal["candidate", "reference"]
    out: str
    events: str
    cases: tuple[RunCase, ...]
    model_dir: str
    backend: str
    profile: str
    ops: str | None = None
    device: str = "cpu"
    layout: dict[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    mode: Literal["judge", "full", "digest"] = "judge"
    byte_cap: int = 1 << 30
    repeats: int = 1
    threads: int = 1
    parent: int = 0
    witness: dict[str, Any] | None = None
    gated: bool = False


@dataclass(frozen=True)
class RunRecord:
    """The content of run.json: how a case ended, with the last operator call that had begun.

    `measured` in it: seconds (observed run, judging included), peak_rss_bytes. `output`: last lines that the process
    printed, given when it did not finish; `log`: the file that holds all of them, relative to the output directory.
    `fused`: groups of operators that ran as one, with their calls in this process so far.
    `missing`: operators with hard inputs that the backend does not have (operator cases). `repeat_equal`: whether the
    unobserved repeat gave the same tokens (None: there was none); `unobserved`: how its logits compare, as
    `compare/unobserved.py` says. `rank`: the one that ended so, of `ranks`.
    """

    status: RunStatus
    message: str = ""
    seconds: float = 0.0
    peak_rss_bytes: int = 0
    last: dict[str, Any] | None = None
    capabilities: tuple[str, ...] = ()
    replaced: tuple[str, ...] = ()
    fused: dict[str, int] = field(default_factory=dict)
    links: dict[str, int] = field(default_factory=dict)
    captured_bytes: int = 0
    dropped_bytes: int = 0
    missing: tuple[str, ...] = ()
    repeat_equal: bool | None = None
    unobserved: dict[str, float] = field(default_factory=dict)
    output: tuple[str, ...] = ()
    log: str = ""
    rank: int | None = None
    ranks: int = 1


def is_operator_case(case: RunCase) -> bool:
    """Whether a case runs operators on their hard inputs, without a model."""
    return case.id.startswith("operators/")


def write_record(directory: Path, record: RunRecord) -> None:
    """run.json in `directory`, which is made when it is not there. Raises RecordError."""
    directory.mkdir(parents=True, exist_ok=True)
    replace_json(directory / "run.json", to_json(record))


def read_record(directory: Path) -> RunRecord | None:
    """run.json of `directory`, None when there is none. Raises InputError for a file that is no record."""
    path = directory / "run.json"
    if not path.is_file():
        return None
    try:
        return from_json(RunRecord, json.loads(path.read_text()))
    except ValueError as error:
        raise InputError(str(error), where=str(path), todo="run the case again") from error


def watched_s(out: Path, case_id: str) -> float:
    """Seconds that watching a case has taken so far, of its slowest rank: judging in the candidate's process, which is
    no time of the candidate's own. What is being watched at this moment is not in it, so that a hang shows."""
    roots = (out, *(out / "ranks").glob("*"))
    beats = [read_heartbeat(case_directory(root, case_id, "candidate") / "heartbeat") for root in roots]
    return max((beat.watched_s for beat in beats if beat is not None), default=0.0)


def load_job(path: str) -> Job:
    """The job in a file. Raises InputError naming the key that does not fit."""
    try:
        return from_json(Job, json.loads(Path(path).read_text()))
    except (OSError, ValueError) as error:
        raise InputError(str(error), where=path, todo="the runner writes this file; start `day0check run`") from error


def error_event(error: Exception) -> dict[str, Any]:
    """An exception of ours as the last event of a worker."""
    what = str(getattr(error, "what", "") or error or type(error).__name__)
    where, todo = str(getattr(error, "where", "")), str(getattr(error, "todo", ""))
    code = int(getattr(error, "exit_code", ExitCode.HARNESS))
    return {"event": "error", "code": code, "what": what, "where": where, "todo": todo}


def error_from(event: dict[str, Any]) -> Day0Error:
    """The exception behind an error event, to be raised by the runner."""
    kind = {ExitCode.USAGE: UsageError}.get(ExitCode(event["code"]), Day0Error)
    return kind(event["what"], where=event["where"], todo=event["todo"])


def command(job_file: Path) -> list[str]:
    return [sys.executable, "-m", "day0check.worker", str(job_file)]
