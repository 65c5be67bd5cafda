"""Manifests of several ranks as one: what is whole is taken once, what is cut is put together by its dims string."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from day0check.compare.merge_rows import row_measures
from day0check.errors import InputError
from day0check.probe.digest import row_digests
from day0check.types import Measure

Line = dict[str, Any]
PARTIAL = "partial@"


@dataclass(frozen=True)
class Dims:
    """A dims string read: `axis` that is cut (None: none), in `components` equal parts of it; `partial`: parts of a
    sum; `rows`: the cut axis is that of the rows."""

    axis: int | None = None
    components: int = 1
    partial: bool = False

    @property
    def rows(self) -> bool:
        return self.axis == 0


def read_dims(text: str) -> Dims:
    """The meaning of a dims string such as "rows, heads@tp, dim" or "rows, channels@tp/3". Raises ValueError for one
    that cuts two axes."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    partial = any(name.startswith(PARTIAL) for name in names)
    cut = [(axis, name) for axis, name in enumerate(n for n in names if not n.startswith(PARTIAL)) if "@" in name]
    if len(cut) > 1:
        raise ValueError(f"two axes are cut in {text!r}")
    if not cut:
        return Dims(partial=partial)
    axis, name = cut[0]
    components = int(name.partition("/")[2] or 1)
    return Dims(axis, components, partial)


@dataclass
class Merged:
    """Where a merged snapshot is written: `folder`, and the files of ranks that are linked into it."""

    folder: Path
    linked: dict[Path, str] = field(default_factory=dict)

    def link(self, file: Path, rank: int) -> str:
        """The name under which a file of a rank is found in the merged snapshot."""
        if file not in self.linked:
            name = f"rank-{rank}-{file.name}"
            target = self.folder / name
            if target.exists():
                target.unlink()
            try:
                os.link(file, target)
            except OSError:
                target.write_bytes(file.read_bytes())
            self.linked[file] = name
        return self.linked[file]


def merge_lines(
    ranks: Sequence[Sequence[Line]], folders: Sequence[Path], merged: Merged
) -> tuple[list[Line], dict[str, torch.Tensor], list[Measure]]:
    """(lines of the merged manifest, tensors that were put together by key, measures of what all ranks should share).

    Raises InputError for a tensor that cannot be read, ValueError for a dims string that cannot.
    """
    calls = calls_of(ranks)
    found: list[Line] = []
    tensors: dict[str, torch.Tensor] = {}
    shared: dict[tuple[str, str], Measure] = {}
    files = Files(folders)
    for members in calls.values():
        dims = read_dims(members[0][1].get("dims", ""))
        if dims.rows:
            found += [_linked(line, rank, folders, merged) for rank, line in members]
        elif dims.axis is not None or dims.partial:
            found.append(_put_together(members, dims, files, tensors))
        else:
            found.append(_linked(members[0][1], members[0][0], folders, merged))
            _compare(members, len(ranks), files, shared)
    measures = _first_difference(list(shared.values())) + row_measures(calls.values())
    return sorted(found, key=lambda line: line["order"]), tensors, measures


def calls_of(ranks: Sequence[Sequence[Line]]) -> dict[tuple[Any, ...], list[tuple[int, Line]]]:
    """The lines of one result of one call on all ranks, by tap, phase, step, number of the result, and which of the
    calls of the tap in the step it is, from 1 on."""
    calls: dict[tuple[Any, ...], list[tuple[int, Line]]] = {}
    for rank, lines in enumerate(ranks):
        nth: dict[tuple[Any, ...], int] = {}
        for line in lines:
            key = (line["tap"], line["phase"], line["step"], line["result"])
            nth[key] = nth.get(key, 0) + 1
            calls.setdefault((*key, nth[key]), []).append((rank, line))
    return calls


def _first_difference(measures: list[Measure]) -> list[Measure]:
    """The measures without differences behind the first one: a rank that went astray differs from there on."""
    wrong = sorted((m for m in measures if not m.passed), key=lambda m: (m.order, m.tap))
    if len(wrong) < 2:
        return measures
    text = f"{wrong[0].message}; so it is in {len(wrong) - 1} later results"
    return [*(m for m in measures if m.passed), replace(wrong[0], message=text)]


class Files:
    """Tensors of the ranks' snapshots; open files are kept."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders, self._open = folders, {}

    def tensor(self, rank: int, line: Line) -> torch.Tensor:
        path = self._folders[rank] / line["file"]
        try:
            if path not in self._open:
                self._open[path] = safe_open(str(path), framework="pt")
            return self._open[path].get_tensor(line["key"])
        except Exception as error:  # safetensors raises types of its own
            what = f"tensor {line['key']!r} of tap {line['tap']} cannot be read: {error}"
            raise InputError(what, where=str(path), todo="run the case again") from error


def _linked(line: Line, rank: int, folders: Sequence[Path], merged: Merged) -> Line:
    if not line.get("file"):
        return dict(line)
    return {**line, "file": merged.link(folders[rank] / line["file"], rank)}


def _put_together(members: list[tuple[int, Line]], dims: Dims, files: Files, tensors: dict[str, torch.Tensor]) -> Line:
    first = members[0][1]
    if any(not line.get("file") for _, line in members):
        return {**first, "file": "", "key": "", "dropped": "a rank left its part out"}
    parts = [files.tensor(rank, line) for rank, line in members]
    if dims.partial:
        whole = torch.stack([p.float() for p in parts]).sum(0).to(parts[0].dtype)
    else:
        whole = joined(parts, axis=dims.axis, components=dims.components)
    key = f"{first['tap']}.{first['phase']}.{first['order']}.{first['result']}"
    tensors[key] = whole.contiguous()
    return {**first, "file": "merged.safetensors", "key": key, "shape": list(whole.shape)}


def joined(parts: Sequence[torch.Tensor], *, axis: int, components: int = 1) -> torch.Tensor:
    """Parts of all ranks joined along `axis`; with `components`, each rank has its part of each of them in turn."""
    pieces = [p.chunk(components, axis) for p in parts]
    return torch.cat([piece[c] for c in range(components) for piece in pieces], axis)


def _compare(members: list[tuple[int, Line]], world: int, files: Files, shared: dict[tuple[str, str], Measure]) -> None:
    """Enters whether a result that every rank has whole is the same on all of them."""
    first = members[0][1]
    at = (first["tap"], first["phase"])
    known = shared.get(at)
    if (known is not None and not known.passed) or not first.get("file"):
        return
    own = files.tensor(members[0][0], first)
    other, row, count = None, None, 0
    for rank, line in members[1:]:
        theirs = files.tensor(rank, line) if line.get("file") else own
        if theirs.shape != own.shape or theirs.dtype != own.dtype:
            other, count = rank, len(own) or 1
            break
        wrong = (row_digests(own) != row_digests(theirs)).nonzero().flatten().tolist()
        if wrong:
            other, row, count = rank, wrong[0], len(wrong)
            break
    missing = sorted(set(range(world)) - {rank for rank, _ in members})
    shared[at] = _shared_measure(
        first, own.shape, other if other is not None else next(iter(missing), None), row, count
    )


def _shared_measure(line: Line, shape: Sequence[int], rank: int | None, row: int | None, count: int) -> Measure:
    request = position = None
    if rank is not None and row is not None and row < len(line["owner"]) and line["owner"][row] >= 0:
        request, position = line["requests"][line["owner"][row]], line["position"][row]
    place = line["tap"].split(".")
    layer = int(place[1]) if place[0] == "layers" else None
    text = f"rank {rank} has another value than rank 0 in {count} of {shape[0] if shape else 1} rows" if count else ""
    if rank is not None and not count:
        text = f"rank {rank} did not record it"
    return Measure(
        tap=f"{line['tap']}.ranks",
        operator=line["operator"],
        kind="exact",
        phase=line["phase"],
        layer=layer,
        order=line["order"],
        rows=shape[0] if shape else 1,
        elements=int(torch.Size(shape).numel()),
        passed=rank is None,
        statistics={"other_rows": float(count)} if rank is None or count else {"other_rows": 1.0},
        limits={"other_rows": 0.0},
        failing="" if rank is None else "other_rows",
        request=request,
        position=position,
        pattern="" if rank is None else "ranks differ",
        message=text,
        rank=rank,
    )
