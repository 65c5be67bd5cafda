"""The frozen records that travel between rooms. Standard library only; every record has a JSON form.

`to_json` and `from_json` are exact inverses for every record here (NaN and infinities travel as the strings
"NaN", "Infinity" and "-Infinity", since JSON has no spelling for them).
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import types
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

Phase = Literal["start", "load", "prefill", "decode", "serve"]
Kind = Literal["compute", "exact", "move", "choose"]
Severity = Literal["blocker", "warning", "note"]
StackLayer = Literal["model", "framework", "operator", "compiler", "communication", "harness"]
Status = Literal["ready", "not_ready", "inconclusive", "error"]
CheckStatus = Literal["passed", "failed", "not_run"]

SCHEMA_VERSION = 1


# ---------------------------------------------------------------------------------------------- what is run


@dataclass(frozen=True)
class Turn:
    """One user turn, already tokenised: `tokens` with every media pad in place, `images` as file paths in order."""

    tokens: tuple[int, ...]
    images: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """One conversation. After the tokens of turn i the candidate generates `max_new_tokens` (or until a stop token),
    then the tokens of turn i+1 follow; positions count on over turns. `id` is `<case>/<request>#<attempt>`.

    `forced` replaces the candidate's own choices in decode (teacher forcing): one tuple per turn, or empty.
    """

    id: str
    turns: tuple[Turn, ...]
    max_new_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()
    arrive_step: int = 0
    temperature: float = 0.0
    seed: int = 0
    forced: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class ScheduleEvent:
    at_step: int
    do: str  # "preempt" | "abort" | "offload" (to the host tier) | "reload" (when an offloaded one may return)
    request: str


@dataclass(frozen=True)
class Schedule:
    """How requests are laid over steps. `chunk` = largest number of prompt rows of one step (None: one shot).

    `mixed`: single tokens of running answers ride along in steps of prompts. `prefix_cache`: a request begins behind
    the longest prefix that an earlier one has computed; states are kept after every `snapshot_blocks` pages. `pages`:
    pages of the pool (None: enough); `host_pages`: pages of the host tier (0: there is none). `memory`: how the pools
    lie and what they hold before anybody writes ("garbage", "shuffled", "end", "strided"; "": as the backend likes),
    which no result may show. `fixed_rows`: decode steps are padded to so many rows, which belong to no request and hold
    what earlier steps left there, as in the replay of a captured graph (0: no padding). `copies`: when copies out of
    host buffers are made ("late": at the last moment that is legal, "at_once": one after the other; "": as the backend
    likes). `prefix_workspace`: rows of the
    memory through which prompts attend to what lies before them, in chunks where that is longer (None: as the backend
    likes).
    """

    chunk: int | None = None
    page: int = 64
    max_batch: int = 8
    events: tuple[ScheduleEvent, ...] = ()
    mixed: bool = False
    prefix_cache: bool = False
    snapshot_blocks: int = 1
    pages: int | None = None
    host_pages: int = 0
    memory: str = ""
    fixed_rows: int = 0
    copies: str = ""
    prefix_workspace: int | None = None


@dataclass(frozen=True)
class Outputs:
    """What a candidate answered. `sequences[id]` = all token ids of the request, prompt and media pads included;
    `generated[id]` = half-open spans of `sequences[id]` that the candidate chose."""

    sequences: dict[str, tuple[int, ...]]
    generated: dict[str, tuple[tuple[int, int], ...]]
    finish: dict[str, str] = field(default_factory=dict)  # "length" | "stop" | "aborted"


@dataclass(frozen=True)
class RunCase:
    """A case expanded and ready to run (from `case.py`)."""

    id: str
    requests: tuple[Request, ...]
    schedule: Schedule = Schedule()
    time_limit_s: float = 60.0
    checks: tuple[str, ...] = ()
    stages: tuple[str, ...] = ("t0",)


# ------------------------------------------------------------------------------------------ what is measured


@dataclass(frozen=True)
class Measure:
    """The judgement of one tap in one phase of one case: a line of `measures.jsonl`.

    `statistics` and `limits` share keys (`whole`, `row`, `column`, `tile`, `z`, `element`, `mismatched_bytes`,
    `regret`, `illegal`, ...); a statistic without a limit is information. `order` is the execution index of the first
    call, so the smallest order among failures is the earliest. The address names the worst row.
    """

    tap: str
    operator: str
    kind: Kind
    phase: Phase
    layer: int | None
    order: int
    rows: int
    elements: int
    passed: bool
    statistics: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    failing: str = ""  # the statistic that decided, empty when passed
    request: str | None = None
    position: int | None = None
    pattern: str = ""  # in words: "one row", "one column", "tile", "nan", "selects the future", ...
    message: str = ""
    digest: str = ""  # position-weighted digest of the output
    power: float | None = None  # smallest relative error this judgement could have seen
    not_judged: str = ""  # a reason when the tap could not be judged; then passed is False
    rank: int | None = None  # the one that decided, where the records of several ranks were joined


@dataclass(frozen=True)
class Finding:
    """Something wrong or noteworthy, with its address. `id` is stable over runs: see `finding_id`."""

    id: str
    severity: Severity
    check: str
    operator: str | None
    message: str
    layer: int | None = None
    phase: Phase | None = None
    request: str | None = None
    position: int | None = None
    value: float | None = None
    limit: float | None = None
    power: float | None = None
    stack_layer: StackLayer = "operator"
    evidence: dict[str, Any] = field(default_factory=dict)
    waived: bool = False


@dataclass(frozen=True)
class CheckOutcome:
    name: str
    status: CheckStatus
    case: str = ""
    summary: str = ""  # one line: how many of what


@dataclass(frozen=True)
class NotRun:
    check: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """The content of `verdict.json`. Everything in time or bytes is under `measured`; machine and versions under
    `environment`; all else is byte-identical between two runs of the same thing."""

    status: Status
    model: dict[str, Any]
    profile: str
    cases: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    first_fault: Finding | None = None
    checks: tuple[CheckOutcome, ...] = ()
    not_run: tuple[NotRun, ...] = ()
    drift: tuple[dict[str, Any], ...] = ()  # propagated net, a row per (case, layer): for the report's curve
    choices: tuple[dict[str, Any], ...] = ()  # selections and routing, a row per tap
    operators: tuple[dict[str, Any], ...] = ()  # worst statistics and power per operator
    environment: dict[str, Any] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def finding_id(check: str, operator: str | None, layer_class: str, phase: str | None, pattern: str) -> str:
    """A stable 12-digit id of (check, operator, layer class, phase, pattern); never of numbers, seeds or paths."""
    text = "\x1f".join((check, operator or "", layer_class, phase or "", pattern))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


# --------------------------------------------------------------------------------------------------- JSON form


def to_json(value: Any) -> Any:
    """Records, tuples and dicts as plain JSON values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value


def from_json(cls: Any, data: Any) -> Any:
    """The record of type `cls` from its JSON form. Raises ValueError naming the field that does not fit."""
    return _read(cls, data, cls.__name__ if isinstance(cls, type) else str(cls))


@cache
def _hints(kind: type) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The types of a record's fields, and the fields without a default: evaluating them took longer than a read."""
    fields = dataclasses.fields(kind)
    bare = [f for f in fields if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    return typing.get_type_hints(kind), tuple(f.name for f in bare)


def _read(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if kind is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        if data is None and type(None) in typing.get_args(kind):
            return None
        options = [k for k in typing.get_args(kind) if k is not type(None)]
        return _read(options[0], data, where)
    if origin is Literal:
        if data not in typing.get_args(kind):
            raise ValueError(f"{where}: {data!r} is none of {', '.join(map(repr, typing.get_args(kind)))}")
        return data
    if origin is tuple:
        if not isinstance(data, (list, tuple)):
            raise ValueError(f"{where}: a list is needed, got {type(data).__name__}")
        args = typing.get_args(kind)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_read(args[0], v, f"{where}[{i}]") for i, v in enumerate(data))
        if len(args) != len(data):
            raise ValueError(f"{where}: {len(args)} values are needed, got {len(data)}")
        return tuple(_read(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(args, data, strict=True)))
    if origin is dict:
        if not isinstance(data, dict):
            raise ValueError(f"{where}: an object is needed, got {type(data).__name__}")
        value_kind = typing.get_args(kind)[1]
        return {k: _read(value_kind, v, f"{where}.{k}") for k, v in data.items()}
    if dataclasses.is_dataclass(kind):
        if not isinstance(data, dict):
            raise ValueError(f"{where}: an object is needed, got {type(data).__name__}")
        hints, required = _hints(kind)
        unknown = sorted(set(data) - set(hints))
        if unknown:
            raise ValueError(f"{where}: unknown key {unknown[0]!r}")
        missing = [name for name in required if name not in data]
        if missing:
            raise ValueError(f"{where}: key {missing[0]!r} is missing")
        return kind(**{k: _read(hints[k], v, f"{where}.{k}") for k, v in data.items()})
    if kind is float:
        if isinstance(data, str) and data in ("NaN", "Infinity", "-Infinity"):
            return float(data.replace("Infinity", "inf"))
        if isinstance(data, bool) or not isinstance(data, (int, float)):
            raise ValueError(f"{where}: a number is needed, got {data!r}")
        return float(data)
    if kind in (int, str, bool):
        if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
            raise ValueError(f"{where}: {kind.__name__} is needed, got {data!r}")
        return data
    return data
