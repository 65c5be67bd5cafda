"""Reads what a candidate's worker captured: run.json, outputs.json, measures.jsonl, manifest.jsonl, step-*.safetensors.

The format is the section "Runs" of CONTRIBUTING.md. Tensors are read one tap at a time, never a whole run.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from day0check.errors import InputError
from day0check.types import Measure, Outputs, from_json

if TYPE_CHECKING:
    import torch

_RERUN = "run the case again: the file was cut or changed after it was written"
_NEEDED = ("tap", "operator", "phase", "step", "order", "owner", "position", "requests")
_OPEN_FILES = 128  # every tap is spread over the files of all steps
_STORED = ("file", "key", "dtype", "shape")


def case_directory(root: Path | str, case_id: str, role: str) -> Path:
    """Where the records of one role of one case lie under the output directory `root` of a run."""
    return Path(root) / "snapshots" / case_id.replace("/", "__") / role


@dataclass(frozen=True)
class Entry:
    """One line of manifest.jsonl: one result of one call. `file` is empty when its bytes were dropped; `owner` is empty
    when the first axis of the result is not that of the call's rows."""

    tap: str
    operator: str
    site: str
    phase: str
    step: int
    order: int
    result: int
    owner: tuple[int, ...]
    position: tuple[int, ...]
    requests: tuple[str, ...]
    file: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    dropped: str  # the reason, empty when the bytes are there


@dataclass(frozen=True)
class Rows:
    """Rows of one tap that belong to one request. `order[i]` is the execution index of the call that wrote row i."""

    positions: tuple[int, ...]
    phases: tuple[str, ...]
    orders: tuple[int, ...]
    values: torch.Tensor


class Snapshot:
    """What one candidate left for one case. `notes` names what had to be left out while reading (cut last lines).

    Raises InputError (file, line or tensor, what to do) for files that are truncated or contradict each other.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise InputError(
                "there is no snapshot here", where=str(self.directory), todo="give the output directory of a run"
            )
        self.notes: list[str] = []
        self._files: OrderedDict[str, Any] = OrderedDict()  # open files, the latest last
        self._cache: dict[tuple[str, int, bool], dict[str, Rows]] = {}

    # ------------------------------------------------------------------------------------------------ records

    @cached_property
    def run(self) -> dict[str, Any]:
        """run.json: status, message, seconds, peak_rss_bytes, last."""
        data = _json_object(self.directory / "run.json")
        if not isinstance(data.get("status"), str):
            raise InputError("the key 'status' is missing", where=str(self.directory / "run.json"), todo=_RERUN)
        return data

    @cached_property
    def outputs(self) -> Outputs | None:
        """outputs.json, or None when the candidate died before it answered."""
        path = self.directory / "outputs.json"
        if not path.exists():
            return None
        try:
            return from_json(Outputs, _json_object(path))
        except ValueError as error:
            raise InputError(str(error), where=str(path), todo=_RERUN) from error

    @cached_property
    def measures(self) -> tuple[Measure, ...]:
        """measures.jsonl, the last line of each (tap, phase): the judge writes a failing measure twice."""
        return read_measures(self.directory / "measures.jsonl", self.notes)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """manifest.jsonl in the order written."""
        path = self.directory / "manifest.jsonl"
        return tuple(_entry(data, f"{path}:{number}") for number, data in _json_lines(path, self.notes))

    # ------------------------------------------------------------------------------------------------ tensors

    def taps(self) -> tuple[str, ...]:
        """Names of the captured taps in order of their first call."""
        return tuple(self._by_tap)

    @cached_property
    def _by_tap(self) -> dict[str, list[Entry]]:
        grouped: dict[str, list[Entry]] = {}
        for entry in sorted(self.entries, key=lambda e: e.order):
            grouped.setdefault(entry.tap, []).append(entry)
        return grouped

    def first_order(self, tap: str) -> int:
        """Execution index of the tap's first call; -1 when it was never called."""
        entries = self._by_tap.get(tap)
        return entries[0].order if entries else -1

    def dropped(self, tap: str) -> str:
        """Why some bytes of this tap are not there; empty when all are."""
        return next((e.dropped for e in self._by_tap.get(tap, ()) if e.dropped), "")

    def requests(self, tap: str) -> tuple[str, ...]:
        """Requests that have rows in this tap."""
        return tuple(dict.fromkeys(e.requests[o] for e in self._by_tap.get(tap, ()) for o in e.owner if o >= 0))

    def fed_lengths(self) -> dict[str, int]:
        """1 + the largest captured position of each request: how much of its sequence went through the model."""
        found: dict[str, int] = {}
        for entry in self.entries:
            for owner, position in zip(entry.owner, entry.position, strict=True):
                if owner >= 0:
                    name = entry.requests[owner]
                    found[name] = max(found.get(name, 0), position + 1)
        return found

    def rows(self, tap: str, request: str, result: int = 0) -> tuple[tuple[int, ...], torch.Tensor]:
        """(positions, values): rows of `request` sorted by position, the latest call that wrote a position wins.

        Positions and values are empty for a tap or request that was not captured. Rows of one call that share a
        position (patches of an image) stay together in their own order. Raises InputError for lying files.
        """
        found = self.recorded(tap, request, result)
        return found.positions, found.values

    def recorded(self, tap: str, request: str, result: int = 0, *, by_position: bool = True) -> Rows:
        """As `rows`, with the phase and the execution index of the call that wrote each row.

        `by_position` False leaves the rows in the order of the calls: patches, whose positions are not their order.
        """
        import torch

        key = (tap, result, by_position)
        if key not in self._cache:
            self._cache.clear()  # one tap at a time: a run's tensors do not fit in memory
            self._cache[key] = self._assemble(tap, result, by_position)
        return self._cache[key].get(request, Rows((), (), (), torch.empty(0)))

    def results(self, tap: str) -> Iterator[tuple[Entry, torch.Tensor]]:
        """Every kept result of a tap in order of execution, also those whose first axis is not the call's rows."""
        for entry in self._by_tap.get(tap, ()):
            if entry.file:
                yield entry, self._read(entry)

    def _assemble(self, tap: str, result: int, by_position: bool) -> dict[str, Rows]:
        import torch

        entries = [e for e in self._by_tap.get(tap, ()) if e.result == result and e.file and e.owner]
        latest: dict[str, dict[int, int]] = {}  # request -> position -> index of the entry that wrote it last
        for index, entry in enumerate(entries):
            for owner, position in zip(entry.owner, entry.position, strict=True):
                if owner >= 0:
                    latest.setdefault(entry.requests[owner], {})[position] = index
        pieces: dict[str, list[tuple[int, int, int]]] = {name: [] for name in latest}  # (position, entry, row)
        for index, entry in enumerate(entries):
            for row, (owner, position) in enumerate(zip(entry.owner, entry.position, strict=True)):
                if owner >= 0 and latest[entry.requests[owner]][position] == index:
                    pieces[entry.requests[owner]].append((position, index, row))
        tensors = [self._tensor(entry) for entry in entries]
        offsets = [0]
        for tensor in tensors:
            offsets.append(offsets[-1] + len(tensor))
        if len({(t.dtype, t.shape[1:]) for t in tensors}) > 1:
            shapes = sorted({f"{t.dtype} {list(t.shape[1:])}" for t in tensors})
            raise InputError(
                f"rows of tap {tap} change shape or dtype between steps: {', '.join(shapes)}",
                where=str(self.directory / "manifest.jsonl"),
                todo="let the operator return one shape and dtype in every step",
            )
        everything = torch.cat(tensors) if tensors else torch.empty(0)
        found = {}
        for name, wanted in pieces.items():
            if by_position:
                wanted.sort(key=lambda p: p[0])  # stable: rows of one position keep their order
            at = torch.tensor([offsets[i] + row for _, i, row in wanted], dtype=torch.int64)
            found[name] = Rows(
                tuple(p for p, _, _ in wanted),
                tuple(entries[i].phase for _, i, _ in wanted),
                tuple(entries[i].order for _, i, _ in wanted),
                everything[at],
            )
        return found

    def _tensor(self, entry: Entry) -> torch.Tensor:
        tensor = self._read(entry)
        if not tensor.shape or tensor.shape[0] != len(entry.owner):
            raise InputError(
                f"tap {entry.tap}: {list(tensor.shape)} for {len(entry.owner)} rows of the row map",
                where=str(self.directory / "manifest.jsonl"),
                todo="give the call the row map of its result",
            )
        return tensor

    def _read(self, entry: Entry) -> torch.Tensor:
        from safetensors import SafetensorError, safe_open

        path = self.directory / entry.file
        if path.resolve().parent != self.directory.resolve():
            raise InputError(f"{entry.file!r} lies outside the snapshot", where=str(self.directory), todo=_RERUN)
        try:
            if entry.file not in self._files:
                self._files[entry.file] = safe_open(str(path), framework="pt")
            self._files.move_to_end(entry.file)
            tensor = self._files[entry.file].get_tensor(entry.key)
            if len(self._files) > _OPEN_FILES:
                self._files.popitem(last=False)
        except FileNotFoundError as error:
            raise InputError(f"the file of tap {entry.tap} is missing", where=str(path), todo=_RERUN) from error
        except (SafetensorError, OSError) as error:
            message = f"tensor {entry.key!r} of tap {entry.tap} cannot be read: {error}"
            raise InputError(message, where=str(path), todo=_RERUN) from error
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != entry.shape or dtype != entry.dtype:
            raise InputError(
                f"tensor {entry.key!r} is {dtype} {list(tensor.shape)}, "
                f"the manifest says {entry.dtype} {list(entry.shape)}",
                where=str(path),
                todo=_RERUN,
            )
        return tensor


def read_measures(path: Path, notes: list[str]) -> tuple[Measure, ...]:
    """The measures of a .jsonl file, the last of each (tap, phase); empty when the file is not there.

    A last line that was cut by a dying process is left out and named in `notes`; any other bad line raises InputError.
    """
    last: dict[tuple[str, str], Measure] = {}
    for number, data in _json_lines(path, notes):
        try:
            measure = from_json(Measure, data)
        except ValueError as error:
            raise InputError(str(error), where=f"{path}:{number}", todo=_RERUN) from error
        last[measure.tap, measure.phase] = measure
    return tuple(sorted(last.values(), key=lambda m: (m.order, m.tap, m.phase)))


def _json_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError("the file is missing", where=str(path), todo="give the directory of a finished run") from error
    except (ValueError, OSError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path), todo=_RERUN) from error
    if not isinstance(data, dict):
        raise InputError(f"a JSON object is needed, got {type(data).__name__}", where=str(path), todo=_RERUN)
    return data


def _json_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    cut = lines[-1] != b""  # a whole line ends with a newline
    numbered = [(i + 1, line) for i, line in enumerate(lines) if line.strip()]
    for number, line in numbered:
        try:
            data = json.loads(line)
        except ValueError as error:
            if cut and number == numbered[-1][0]:
                notes.append(f"{path.name}: the last line was cut and is left out")
                return
            raise InputError(f"not a line of JSON: {error}", where=f"{path}:{number}", todo=_RERUN) from error
        if not isinstance(data, dict):
            raise InputError("a JSON object is needed on each line", where=f"{path}:{number}", todo=_RERUN)
        yield number, data


def _entry(data: dict[str, Any], where: str) -> Entry:
    dropped = data.get("dropped", "")
    reason = dropped if isinstance(dropped, str) else ("dropped by the byte cap" if dropped else "")
    for key in _NEEDED + (() if reason else _STORED):
        if key not in data:
            raise InputError(f"key {key!r} is missing", where=where, todo=_RERUN)
    try:
        entry = Entry(
            tap=str(data["tap"]),
            operator=str(data["operator"]),
            site=str(data.get("site", "")),
            phase=str(data["phase"]),
            step=int(data["step"]),
            order=int(data["order"]),
            result=int(data.get("result", 0)),
            owner=tuple(int(v) for v in data["owner"]),
            position=tuple(int(v) for v in data["position"]),
            requests=tuple(str(v) for v in data["requests"]),
            file="" if reason else str(data["file"]),
            key=str(data.get("key", "")),
            dtype=str(data.get("dtype", "")).removeprefix("torch."),
            shape=tuple(int(v) for v in data.get("shape", ())),
            dropped=reason,
        )
    except (TypeError, ValueError) as error:
        raise InputError(f"a value has the wrong form: {error}", where=where, todo=_RERUN) from error
    if len(entry.owner) != len(entry.position):
        raise InputError(f"{len(entry.owner)} owners for {len(entry.position)} positions", where=where, todo=_RERUN)
    if any(o >= len(entry.requests) for o in entry.owner):
        raise InputError("a row belongs to a request that the line does not name", where=where, todo=_RERUN)
    return entry
