"""Sums over ranks whose parts no single rank saw: the parts of all ranks against the sum that each of them got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from day0check.compare.local import Judge
from day0check.compare.merge_manifest import Files, calls_of
from day0check.contracts.profiles import profile_named
from day0check.probe.fused_sums import REDUCE
from day0check.probe.recorder import Recorder
from day0check.probe.rows import RowMap
from day0check.types import Measure

Line = dict[str, Any]
Sides = dict[int, Line]  # by rank
PART, SUM = -1, 0


def sum_measures(ranks: Sequence[Sequence[Line]], folders: Sequence[Path], *, profile: str) -> list[Measure]:
    """A measure for each (tap, phase) of `comm.all_reduce` that gathers its parts itself, judged like any other sum of
    the profile, and one that asks whether all ranks got the same sum.

    `ranks`: manifests of `probe/fused_sums.py` in `folders`. A call of which a rank's part or sum is not there is not
    judged. Raises InputError for a tensor that cannot be read.
    """
    sides: dict[tuple[Any, ...], dict[int, Sides]] = {}
    for key, members in calls_of(ranks).items():
        tap, phase, step, result, nth = key
        sides.setdefault((tap, phase, step, nth), {})[result] = dict(members)
    judged: dict[tuple[str, str], Measure] = {}
    recorder = Recorder([Judge(profile_named(profile), lambda m: judged.update({(m.tap, m.phase): m}))])
    files, found = Files(folders), {}
    for (tap, phase, _, _), both in sides.items():
        parts, sums = both.get(PART, {}), both.get(SUM, {})
        first = next(iter({**sums, **parts}.values()))
        lacking = [r for r in range(len(ranks)) if not all(side.get(r, {}).get("file") for side in (parts, sums))]
        if lacking:
            reason = f"rank {lacking[0]} left no part or no sum of it"
            found.setdefault((tap, phase, "lost"), _measure(first, tap, not_judged=reason, rank=lacking[0]))
            continue
        own = [files.tensor(rank, sums[rank]) for rank in range(len(ranks))]
        _replay(recorder, first, torch.stack([files.tensor(r, parts[r]) for r in range(len(ranks))], 1), own[0])
        other = next((rank for rank, value in enumerate(own) if not _same(value, own[0])), None)
        at = (tap, phase, "ranks")
        if at not in found or (found[at].passed and other is not None):
            text = "" if other is None else f"rank {other} got another sum than rank 0"
            found[at] = _measure(first, f"{tap}.ranks", message=text, rank=other)
    recorder.end_case()
    return [*judged.values(), *found.values()]


def _replay(recorder: Recorder, line: Line, parts: torch.Tensor, total: torch.Tensor) -> None:
    """Shows the judge the call as if one rank had gathered `parts` [rows, N, D]."""
    rows = RowMap(tuple(line["requests"]), tuple(line["owner"]), tuple(line["position"]))
    place = line["tap"].partition(f".{REDUCE}")[0]
    with recorder.step(line["phase"], rows, line["step"]):
        recorder.order = line["order"]
        recorder.call(place, REDUCE, lambda _: total, (parts,), {}, line["site"])


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype
    return alike and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _measure(line: Line, tap: str, *, message: str = "", not_judged: str = "", rank: int | None) -> Measure:
    place = line["tap"].split(".")
    passed = Measure(
        tap=tap,
        operator=REDUCE,
        kind="exact",
        phase=line["phase"],
        layer=int(place[1]) if place[0] == "layers" else None,
        order=line["order"],
        rows=len(line["owner"]),
        elements=len(line["owner"]),
        passed=True,
        statistics={"other_ranks": 0.0},
        limits={"other_ranks": 0.0},
        rank=rank,
    )
    if not_judged:
        return replace(passed, passed=False, not_judged=not_judged)
    if not message:
        return passed
    wrong = {"failing": "other_ranks", "statistics": {"other_ranks": 1.0}, "pattern": "ranks differ"}
    return replace(passed, passed=False, message=message, **wrong)
