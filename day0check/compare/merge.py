"""The records of all ranks of a run as those of one: the judgements, the travelling results, what was exchanged.

Results that every rank has whole are compared with each other, byte by byte, and taken from rank 0; rows that are cut
over ranks are put together by their row maps; other axes are joined, and parts of a sum are added.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from day0check.compare.merge_exchanges import exchange_measures, number_measures, pair_measures
from day0check.compare.merge_manifest import Merged, merge_lines
from day0check.compare.merge_sums import sum_measures
from day0check.contracts import CONTRACTS
from day0check.probe.capture import MANIFEST
from day0check.probe.fused_sums import FOLDER
from day0check.probe.records import replace_bytes, replace_json
from day0check.probe.safetensors_writer import write
from day0check.snapshot import Snapshot
from day0check.types import Measure, to_json

EXCHANGES = "exchanges.jsonl"
RANKS = "ranks.json"
PARAMETERS = "parameters.jsonl"
EXTRA = "extra"  # the folder of a case's further runs
_LINKED = ("outputs.json", "timing.jsonl")


def merge_case(
    ranks: Sequence[Path],
    into: Path,
    *,
    expert_parallel: bool,
    facts: dict[str, Any],
    finished: bool = True,
    profile: str = "bf16",
) -> list[Measure]:
    """Writes under `into` what a candidate on one device would have left, from the snapshot of each rank, in order.

    `profile`: what is claimed of sums that no rank alone could judge. `facts`: what stands in ranks.json beside the
    folders. `finished`: whether all ranks came to the end; without it only the judgements are joined, since any rank
    may lack what the others gave it. Gives the merged measures. Raises InputError for records that cannot be read.
    """
    snapshots = [Snapshot(folder) for folder in ranks]
    measures = merged_measures([s.measures if finished else _without_lost_links(s.measures) for s in snapshots])
    if finished:
        lines = [read_lines(folder / EXCHANGES) for folder in ranks]
        measures += exchange_measures(lines)
        measures += pair_measures(lines, expert_parallel=expert_parallel)
        sums = [folder / FOLDER for folder in ranks]
        measures += sum_measures([read_lines(folder / MANIFEST) for folder in sums], sums, profile=profile)
        measures += number_measures(lines, facts["experts"]) if facts.get("experts") else []
        manifest, tensors, replicas = _manifest(ranks, into)
        measures += replicas + _outputs(snapshots)
        if tensors:
            write(into / "merged.safetensors", tensors)
        _write_lines(into / MANIFEST, manifest)
        merge_extra(ranks, into)
    measures.sort(key=lambda m: (m.order, m.tap, m.phase))
    _write_lines(into / "measures.jsonl", [to_json(m) for m in measures])
    for name in _LINKED:
        if (ranks[0] / name).is_file():
            _link(ranks[0] / name, into / name)
    folders = [os.path.relpath(folder, into) for folder in ranks]
    replace_json(into / RANKS, {**facts, "folders": folders})
    return measures


def merge_extra(ranks: Sequence[Path], into: Path) -> None:
    """The further runs of the case that all ranks made, each as one snapshot under `into`/extra."""
    labels = sorted({folder.name for rank in ranks for folder in (rank / EXTRA).glob("*")})
    for label in labels:
        folders, target = [rank / EXTRA / label for rank in ranks], into / EXTRA / label
        target.mkdir(parents=True, exist_ok=True)
        records = [_record(folder / "run.json") for folder in folders]
        other = next((rank for rank, record in enumerate(records) if record.get("status") != "finished"), None)
        if other is not None:
            text = f"on rank {other}: {records[other].get('message', 'it left no record')}"
            replace_json(target / "run.json", {"label": label, "status": "failed", **records[other], "message": text})
            continue
        manifest, tensors, _ = merge_lines([read_lines(f / MANIFEST) for f in folders], folders, Merged(target))
        if tensors:
            write(target / "merged.safetensors", tensors)
        _write_lines(target / MANIFEST, manifest)
        measures = merged_measures([Snapshot(folder).measures for folder in folders])
        _write_lines(target / "measures.jsonl", [to_json(m) for m in measures])
        for name in ("run.json", "outputs.json"):
            _link(folders[0] / name, target / name)


def _record(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def ranks_facts(candidate: Path) -> dict[str, Any]:
    """What stands in ranks.json of a merged snapshot; empty for a run on one device."""
    path = candidate / RANKS
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def rank_folders(candidate: Path) -> list[Path]:
    """The snapshots of the ranks behind a merged one, in order; empty for a run on one device."""
    return [(candidate / folder).resolve() for folder in ranks_facts(candidate).get("folders", ())]


def _without_lost_links(measures: Iterable[Measure]) -> list[Measure]:
    """The measures without calls between ranks that raised: when a rank is gone, the others lose their links to it."""
    return [m for m in measures if not (m.pattern == "raised" and CONTRACTS[m.operator].joined)]


def merged_measures(ranks: Sequence[Iterable[Measure]]) -> list[Measure]:
    """One measure for each (tap, phase): the earliest that fails, or one that was not judged, or the tightest."""
    found: dict[tuple[str, str], list[tuple[int, Measure]]] = {}
    for rank, measures in enumerate(ranks):
        for measure in measures:
            found.setdefault((measure.tap, measure.phase), []).append((rank, measure))
    return [_joined(members) for members in found.values()]


def _joined(members: list[tuple[int, Measure]]) -> Measure:
    failing = [(m.order, rank, m) for rank, m in members if not m.passed and not m.not_judged]
    unjudged = [(m.order, rank, m) for rank, m in members if m.not_judged]
    if failing or unjudged:
        _, rank, told = min(failing or unjudged, key=lambda f: f[:2])
        text = f"on rank {rank}: {told.message}" if told.message else told.message
        reason = f"on rank {rank}: {told.not_judged}" if told.not_judged else ""
        told = replace(told, message=text, not_judged=reason, rank=rank)
    else:
        _, told = max(members, key=lambda f: (_tightness(f[1]), -f[0]))
    powers = [m.power for _, m in members if m.power is not None]
    digests = "/".join(m.digest for _, m in members)
    return replace(
        told,
        rows=sum(m.rows for _, m in members),
        elements=sum(m.elements for _, m in members),
        power=max(powers, default=None),
        digest=hashlib.sha256(digests.encode()).hexdigest()[:32] if any(m.digest for _, m in members) else "",
    )


def _tightness(measure: Measure) -> float:
    return max(
        (measure.statistics[k] / v for k, v in measure.limits.items() if v > 0 and k in measure.statistics), default=0
    )


def _manifest(ranks: Sequence[Path], into: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], list[Measure]]:
    merged = Merged(into)
    return merge_lines([read_lines(folder / MANIFEST) for folder in ranks], ranks, merged)


def _outputs(snapshots: Sequence[Snapshot]) -> list[Measure]:
    """Every rank must give the same answers."""
    outputs = [s.outputs for s in snapshots]
    if any(o is None for o in outputs):
        return []
    other = [rank for rank, o in enumerate(outputs) if o != outputs[0]]
    order = max((m.order for s in snapshots for m in s.measures), default=0) + 1
    text = f"rank {other[0]} answers with other tokens than rank 0" if other else ""
    return [
        Measure(
            tap="sample.token.ranks",
            operator="sample.token",
            kind="exact",
            phase="decode",
            layer=None,
            order=order,
            rows=len(outputs),
            elements=len(outputs),
            passed=not other,
            statistics={"other_ranks": float(len(other))},
            limits={"other_ranks": 0.0},
            failing="other_ranks" if other else "",
            pattern="ranks differ" if other else "",
            message=text,
            rank=other[0] if other else None,
        )
    ]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file of JSON lines; the last one may have been cut by a process that died."""
    if not path.is_file():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [json.loads(line) for line in whole.split(b"\n") if line.strip()]


def _write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    replace_bytes(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode())


def _link(source: Path, target: Path) -> None:
    """`source` also as `target`, without a copy where the file system can."""
    if target.exists():
        target.unlink()
    try:
        os.link(source, target)
    except OSError:
        replace_bytes(target, source.read_bytes())
