"""The format of case files: TOML read, checked key by key and expanded over its matrix.

    id = "text/two_turns"                  subject/name; the id a run, a finding and a baseline carry
    stage = ["t0", "t1"]                   smoke, t-minus, t0, t1
    model = "tiny"                         optional: the case is only for this preset
    profile = "bf16"                       optional: the case is only for this profile
    time_limit_s = 60
    [[request]]                            id, turns, max_new_tokens (per turn), arrive_step, temperature,
                                           seed, stop_tokens
    turns = [ { user = "file:prose.txt#0:200" }, { image = "package:skimage/coffee.png", user = "What is this?" } ]
    [schedule]                             chunk, page, max_batch, events = [ { at_step, do, request } ], mixed,
                                           prefix_cache, snapshot_blocks, pages, host_pages, fixed_rows,
                                           prefix_workspace: see `types.Schedule`
    [expect]                               checks
    [matrix]                               "schedule.chunk" = [63, 64]: a case per combination: id[schedule.chunk=63]
    [[exclude]]                            combinations of the matrix that are left out

A text or image is inline text, "file:NAME", "file:NAME#START:STOP" (bytes of a text) or "package:NAME/FILE" (an image
that a Python package ships); lists are joined. Files lie beside the case or in `cases/data`. No torch here.
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from day0check.errors import InputError

STAGES = ("smoke", "t-minus", "t0", "t1")
DEFAULT_STAGE = "t0"
WITHOUT_MODEL = "operators/"  # ids under this need no model and hold no request
WITHOUT_REQUEST = (WITHOUT_MODEL, "service/")  # a service is asked what `load/scenario.py` holds

# ------------------------------------------------------------------------------------------------- the format


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Natural = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]
Sources = Annotated[tuple[Annotated[str, Field(strict=True)], ...], BeforeValidator(_as_list)]
Stages = Annotated[tuple[Literal["smoke", "t-minus", "t0", "t1"], ...], BeforeValidator(_as_list), Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TurnEntry(_Strict):
    """One user turn: the images in order, then the text."""

    user: Sources = ()
    image: Sources = ()


class RequestEntry(_Strict):
    id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+$")]
    turns: Annotated[tuple[TurnEntry, ...], Field(min_length=1)]
    max_new_tokens: Natural = 0
    arrive_step: Natural = 0
    temperature: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0
    seed: Natural = 0
    stop_tokens: tuple[Natural, ...] = ()


class EventEntry(_Strict):
    at_step: Natural
    do: Literal["preempt", "abort", "offload", "reload"]
    request: str


class ScheduleEntry(_Strict):
    chunk: Positive | None = None
    page: Positive = 64
    max_batch: Positive = 8
    events: tuple[EventEntry, ...] = ()
    mixed: Annotated[bool, Field(strict=True)] = False
    prefix_cache: Annotated[bool, Field(strict=True)] = False
    snapshot_blocks: Positive = 1
    pages: Positive | None = None
    host_pages: Natural = 0
    fixed_rows: Natural = 0
    prefix_workspace: Positive | None = None


class ExpectEntry(_Strict):
    checks: tuple[str, ...] = ()


class CaseEntry(_Strict):
    """One case as its file says it, after expansion of the matrix; nothing is resolved or tokenised yet."""

    id: Annotated[str, Field(pattern=r"^[a-z0-9_]+(/[a-z0-9_]+)*(\[[^\[\]/]*\])?$")]
    stage: Stages = (DEFAULT_STAGE,)
    model: str | None = None
    profile: str | None = None
    time_limit_s: Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)] = 60.0
    request: tuple[RequestEntry, ...] = ()
    schedule: ScheduleEntry = ScheduleEntry()
    expect: ExpectEntry = ExpectEntry()

    @property
    def needs_vision(self) -> bool:
        return any(turn.image for request in self.request for turn in request.turns)


@dataclass(frozen=True)
class Located:
    """A case and the file it came from."""

    entry: CaseEntry
    file: Path


_KNOWN = sorted({name for model in _Strict.__subclasses__() for name in model.model_fields} | {"matrix", "exclude"})

Problems = list[tuple[str, str]]  # (key path, what is wrong), in order of the file


# --------------------------------------------------------------------------------------------------- reading


def packaged_root() -> Path:
    """The folder of the cases that day0check ships: beside the package, in a checkout and when installed."""
    return Path(__file__).resolve().parent.parent / "cases"


def read_case_file(path: Path) -> tuple[Located, ...]:
    """The cases of one TOML file, one per combination of its matrix, in the order of the matrix.

    Raises InputError that names the file and every key that does not fit.
    """
    try:
        raw = tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path), todo="give the path of a case file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"not UTF-8: byte {error.start}", where=str(path), todo="save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"not TOML: {error}", where=str(path), todo="correct the line that is named") from None
    problems: Problems = []
    entries = []
    for combination in _combinations(raw, problems):
        entry = _validate(raw, combination, problems)
        if entry is not None:
            problems += contradictions(entry)
            entries.append(entry)
    raise_all(path, problems)
    return tuple(Located(entry, path) for entry in entries)


def catalogue(root: Path | None = None) -> tuple[Located, ...]:
    """All cases under `root` (the packaged ones by default), sorted by id. Raises InputError over all bad files."""
    found, messages = [], []
    for path in sorted((root or packaged_root()).rglob("*.toml")):
        try:
            found += read_case_file(path)
        except InputError as error:
            messages.append(str(error))
    if messages:
        raise InputError("\n".join(messages))
    refuse_twins(found)
    return tuple(sorted(found, key=lambda located: located.entry.id))


def _combinations(raw: Mapping[str, Any], problems: Problems) -> list[dict[str, Any]]:
    """The combinations of the matrix that `exclude` leaves: {key path: value}, key paths sorted."""
    matrix, exclude = raw.get("matrix", {}), raw.get("exclude", [])
    if not isinstance(matrix, dict) or not isinstance(exclude, list) or not all(isinstance(e, dict) for e in exclude):
        problems.append(("matrix", "matrix is a table of lists, exclude a list of tables"))
        return []
    for key, values in matrix.items():
        plain = isinstance(values, list) and values and all(isinstance(v, (int, float, str)) for v in values)
        if not plain:
            problems.append((f"matrix.{key}", "a list of numbers, booleans or strings is needed"))
        elif len(set(map(_spelling, values))) < len(values):
            problems.append((f"matrix.{key}", "a value stands twice"))
    if problems:
        return []
    keys = sorted(matrix)
    every = [dict(zip(keys, values, strict=True)) for values in itertools.product(*(matrix[k] for k in keys))]
    for i, excluded in enumerate(exclude):
        if not excluded or not any(excluded.items() <= combination.items() for combination in every):
            problems.append((f"exclude[{i}]", "matches no combination of the matrix"))
    kept = [c for c in every if not any(excluded.items() <= c.items() for excluded in exclude)]
    if not kept:
        problems.append(("exclude", "leaves no combination of the matrix"))
    return kept


def _spelling(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _validate(raw: Mapping[str, Any], combination: Mapping[str, Any], problems: Problems) -> CaseEntry | None:
    """The case of one combination, or None with its problems added."""
    data = _copy({key: value for key, value in raw.items() if key not in ("matrix", "exclude")})
    for path, value in combination.items():
        if not _place(data, path.split("."), value):
            problems.append((f"matrix.{path}", "no such key in this case"))
            return None
    if combination:
        data["id"] = f"{data.get('id', '')}[{','.join(f'{k}={_spelling(v)}' for k, v in combination.items())}]"
    try:
        return CaseEntry.model_validate(data)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        inner = {e["loc"][:depth] for e in errors for depth in range(len(e["loc"]))}
        # a list is also called too short when its entries are wrong: the entries are what to correct
        own = [e for e in errors if e["type"] != "too_short" or e["loc"] not in inner]
        problems += [(_key_path(e["loc"]), _sentence(e)) for e in own]
        return None


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _copy(v) for k, v in value.items()}
    return [_copy(v) for v in value] if isinstance(value, list) else value


def _place(data: dict[str, Any], path: list[str], value: Any) -> bool:
    """Writes `value` at the key path; `request.ID.key` is one request, `request.key` all of them."""
    if path[0] == "request":
        requests = [r for r in data.get("request", []) if isinstance(r, dict)]
        chosen = requests if len(path) == 2 else [r for r in requests if r.get("id") == path[1]]
        for request in chosen:
            request[path[-1]] = value
        return len(path) in (2, 3) and bool(chosen)
    table = data
    for key in path[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            return False
    table[path[-1]] = value
    return True


def _key_path(location: Iterable[Any]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


def _sentence(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(str(error["loc"][-1]), _KNOWN, n=1)
        return "unknown key" + (f"; did you mean {near[0]!r}?" if near else "")
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "string_pattern_mismatch":
        return f"{error['input']!r} is not made of plain words (letters, digits, _; a case id in lower case with /)"
    if error["type"] == "too_short":
        return "is empty"
    given = error.get("input")
    got = f", got {given!r}" if isinstance(given, (int, float, str, bool)) else ""
    message = error["msg"].replace("valid tuple", "list").replace("Input", "input")
    return message + got


def contradictions(entry: CaseEntry) -> Problems:
    """What each key allows but the case as a whole does not."""
    problems: Problems = []
    names = [request.id for request in entry.request]
    for i, request in enumerate(entry.request):
        if request.id in names[:i]:
            problems.append((f"request[{i}].id", f"{request.id!r} stands twice"))
        for j, turn in enumerate(request.turns):
            if not "".join(turn.user) and not turn.image:
                problems.append((f"request[{i}].turns[{j}]", "neither text nor image"))
    for i, event in enumerate(entry.schedule.events):
        if event.request not in names:
            problems.append((f"schedule.events[{i}].request", f"no request {event.request!r} in this case"))
    if entry.id.startswith(WITHOUT_REQUEST) and names:
        problems.append(("request", f"a case under {' or '.join(WITHOUT_REQUEST)} runs no model and holds no request"))
    if not entry.id.startswith(WITHOUT_REQUEST) and not names:
        problems.append(("request", "at least one request is needed"))
    return problems


def raise_all(path: Path, problems: Problems) -> None:
    """Raises one InputError for all problems of a file, each once; nothing when there are none."""
    lines = [f"{key}: {what}" if key else what for key, what in dict.fromkeys(problems)]
    if len(lines) == 1:
        raise InputError(lines[0], where=str(path), todo="correct this key; day0check/case_format.py lists the format")
    if lines:
        what = f"{len(lines)} keys do not fit\n" + "\n".join(f"    {line}" for line in lines)
        raise InputError(what, where=str(path), todo="correct these keys; day0check/case_format.py lists the format")


def refuse_twins(found: Iterable[Located]) -> None:
    seen: dict[str, Path] = {}
    for located in found:
        first = seen.setdefault(located.entry.id, located.file)
        if first is not located.file and first.resolve() != located.file.resolve():
            raise InputError(
                f"id: {located.entry.id!r} is also the id of {first}",
                where=str(located.file),
                todo="rename one of them",
            )
