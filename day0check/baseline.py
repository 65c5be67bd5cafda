"""Recorded baselines: what a run measured, kept under its key, one file per case.

`baselines/<NAME>/<case>--<key>.json` holds the digests, ratios and choices of every tap and the raw samples of time and
memory. The key is case, model digest, kind and count of the hardware, parallel layout, profile and load shape. Driver,
compiler, framework, torch and commit are recorded, never part of the key: their change is what a gate examines.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from day0check.contracts.profiles import MISFIT
from day0check.errors import InputError, UsageError
from day0check.gate import Scene, write_text
from day0check.snapshot import Snapshot, case_directory, read_measures
from day0check.statistics import median
from day0check.types import Measure, RunCase, Verdict, from_json, to_json
from day0check.verdict_rows import last_of_each

SCHEMA_VERSION = 1
KEY_PARTS = ("case", "model", "hardware", "layout", "profile", "load")


@dataclass(frozen=True)
class Tap:
    """What is kept of one measure. `statistics`: those with a limit, which is in `limits`."""

    tap: str
    operator: str
    kind: str
    phase: str
    order: int
    elements: int
    digest: str
    statistics: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """One step of an unobserved repeat: a line of `timing.jsonl`."""

    phase: str
    step: int
    rows: int
    seconds: float
    waited_seconds: float
    machine_seconds: float

    @property
    def own_seconds(self) -> float:
        """Without the time in which the machine worked for others."""
        return max(self.seconds - self.waited_seconds, 1e-9)


@dataclass(frozen=True)
class Times:
    """Raw samples of one run of the case."""

    steps: tuple[Sample, ...]
    peak_rss_bytes: int


@dataclass(frozen=True)
class Entry:
    """Everything kept of one case. `net`: taps of the propagated comparison. `unstable`: taps whose digest differed
    among the runs that were recorded together, so that other bits say nothing. `fits[operator][form]`: at how many taps
    a form tighter than the claimed one was tried; 0 when one of them did not fit it."""

    key: dict[str, Any]
    recorded: dict[str, Any]
    taps: dict[str, Tap]
    net: dict[str, Tap]
    tokens: str
    runs: tuple[Times, ...]
    unstable: tuple[str, ...] = ()
    fits: dict[str, dict[str, int]] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    @property
    def case(self) -> str:
        return str(self.key["case"])


@dataclass(frozen=True)
class Baseline:
    name: str
    entries: tuple[Entry, ...]


# --------------------------------------------------------------------------------------------- what a run measured


def load_shape(case: RunCase) -> dict[str, Any]:
    """The load of a case: how much of what, in which schedule, and a digest of all of it (images by file name)."""
    data = to_json(case)
    for request in data["requests"]:
        for turn in request["turns"]:
            turn["images"] = [Path(image).name for image in turn["images"]]
    turns = [turn for request in case.requests for turn in request.turns]
    text = json.dumps({k: data[k] for k in ("requests", "schedule")}, sort_keys=True)
    return {
        "requests": len(case.requests),
        "prompt_tokens": sum(len(turn.tokens) for turn in turns),
        "chunk": case.schedule.chunk,
        "page": case.schedule.page,
        "max_batch": case.schedule.max_batch,
        "digest": hashlib.sha256(text.encode()).hexdigest()[:12],
    }


def hardware(device: str, environment: dict[str, Any]) -> dict[str, Any]:
    """Kind and count of what the candidate ran on, from the environment record."""
    if device.split(":")[0] == "cpu":
        cpu = environment.get("cpu")
        kind = cpu.get("model") if isinstance(cpu, dict) else cpu
        count = cpu.get("cores") if isinstance(cpu, dict) else environment.get("cores")
        return {"kind": f"cpu {kind or 'unknown'}", "count": count}
    cards = environment.get("accelerators") or ()
    index = int(device.split(":")[1]) if ":" in device else 0
    card = cards[index] if index < len(cards) else {}
    return {"kind": card.get("name", device.split(":")[0]) if isinstance(card, dict) else str(card), "count": 1}


def collect(folder: Path, scene: Scene | Verdict) -> dict[str, Entry]:
    """What the finished cases of the run in `folder` measured, by case. Raises InputError for damaged records."""
    entries = {}
    for case in scene.cases:
        if case in scene.measured.get("service", {}):
            continue  # a service has neither operators nor steps of its own that could be compared
        candidate = case_directory(folder, case, "candidate")
        if not (candidate / "run.json").is_file():
            raise InputError("the record of this case is missing", where=str(candidate), todo="run the cases again")
        snapshot = Snapshot(candidate)
        if snapshot.run["status"] != "finished":
            continue
        steps = read_timing(candidate / "timing.jsonl")
        net_file = case_directory(folder, case, "reference") / "net.jsonl"
        net = read_measures(net_file, []) if net_file.is_file() else ()
        entries[case] = Entry(
            key=_key(case, scene),
            recorded={"environment": scene.environment, "status": getattr(scene, "status", "")},
            taps=_taps(snapshot.measures),
            net=_taps(net),
            tokens=_tokens(snapshot),
            runs=(Times(steps, int(snapshot.run.get("peak_rss_bytes", 0))),),
            fits=_fits(snapshot.measures),
        )
    return entries


def _key(case: str, scene: Scene | Verdict) -> dict[str, Any]:
    row = scene.measured.get("cases", {}).get(case, {})
    return {
        "case": case,
        "model": {key: scene.model.get(key) for key in ("name", "digest")},
        "hardware": hardware(str(scene.model.get("device", "")), scene.environment),
        "layout": scene.model.get("layout", {}),
        "profile": scene.profile,
        "load": row.get("load", {}),
    }


def _taps(measures: Iterable[Measure]) -> dict[str, Tap]:
    taps = {}
    for m in last_of_each(measures):
        limited = {k: v for k, v in m.statistics.items() if k in m.limits}
        limits = {k: m.limits[k] for k in limited}
        taps[f"{m.tap}|{m.phase}"] = Tap(
            m.tap, m.operator, m.kind, m.phase, m.order, m.elements, m.digest, limited, limits
        )
    return taps


def _fits(measures: Iterable[Measure]) -> dict[str, dict[str, int]]:
    tried: dict[str, dict[str, list[float]]] = {}
    for m in last_of_each(measures):
        for key, misfit in m.statistics.items():
            if key.startswith(MISFIT):
                tried.setdefault(m.operator, {}).setdefault(key.removeprefix(MISFIT), []).append(misfit)
    return {name: {form: 0 if any(v) else len(v) for form, v in forms.items()} for name, forms in tried.items()}


def _tokens(snapshot: Snapshot) -> str:
    if snapshot.outputs is None:
        return ""
    text = json.dumps(to_json(snapshot.outputs.sequences), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_timing(path: Path) -> tuple[Sample, ...]:
    """The samples of a `timing.jsonl`; none when there is no such file. Raises InputError naming the line."""
    if not path.is_file():
        return ()
    samples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            samples.append(from_json(Sample, json.loads(line)))
        except ValueError as cause:
            raise InputError(f"not a timing sample: {cause}", where=f"{path}:{number}", todo="run again") from cause
    return tuple(samples)


# ------------------------------------------------------------------------------------------------------ the files


def record(
    runs: Sequence[dict[str, Entry]], root: Path, name: str, *, at: str, reason: str | None = None
) -> tuple[Path, ...]:
    """Keeps the cases of one or more runs of the same thing as baseline `name`; all checked before any is written.

    Raises UsageError when there is nothing to keep, the runs do not belong together, or a file would be replaced
    without a `reason`; InputError when the file to be replaced cannot be read (it is left as it is).
    """
    folder = baseline_folder(root, name)
    merged = {case: merge([run[case] for run in runs if case in run]) for case in sorted({c for r in runs for c in r})}
    if not merged:
        raise UsageError("no case of the run finished", where=name, todo="record a run whose cases finished")
    texts: dict[Path, str] = {}
    for case, entry in merged.items():
        file = folder / file_name(entry.key)
        history: list[dict[str, str]] = []
        if file.exists():
            if reason is None:
                what = "a baseline of this case and key is there already"
                raise UsageError(what, where=str(file), todo="give --replace REASON to record it anew")
            history = list(read_entry(file).recorded.get("history", ()))
        elif not entry.taps and not entry.runs[0].steps:
            raise UsageError(f"case {case} has neither measures nor times", where=name, todo="run it again")
        told = {**entry.recorded, "at": at, "history": [*history, {"at": at, "reason": reason or "first recorded"}]}
        entry = replace(entry, recorded=told)
        texts[file] = json.dumps(to_json(entry), sort_keys=True, indent=1, allow_nan=False) + "\n"
    for file, text in texts.items():
        write_text(file, text)
    return tuple(texts)


def merge(entries: Sequence[Entry]) -> Entry:
    """One entry of several runs of the same key: numbers of the first, times of all, unstable taps named."""
    first = entries[0]
    for other in entries[1:]:
        if other.key != first.key:
            what = f"the runs differ in {', '.join(differing_parts(first.key, other.key))}"
            raise UsageError(what, where=first.case, todo="record runs of the same thing together")
    unstable = {k for e in entries[1:] for k in first.taps if k in e.taps and e.taps[k].digest != first.taps[k].digest}
    return replace(first, runs=tuple(r for e in entries for r in e.runs), unstable=tuple(sorted(unstable)))


def file_name(key: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(to_json(key), sort_keys=True).encode()).hexdigest()[:8]
    safe = re.sub(r"[^A-Za-z0-9_.=,-]", "_", str(key["case"]).replace("/", "__"))
    return f"{safe}--{digest}.json"


def baseline_folder(root: Path, name: str) -> Path:
    """The folder of baseline `name`. Raises UsageError for a name that is no plain folder name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise UsageError(f"{name!r} is no name of a baseline", todo="use letters, digits, '.', '_' and '-'")
    return root / name


def read_baseline(root: Path, name: str) -> Baseline:
    """All entries of a baseline. Raises UsageError when there is none, InputError for a file that cannot be used."""
    folder = baseline_folder(root, name)
    files = sorted(folder.glob("*.json"))
    if not files:
        known = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
        todo = (
            f"recorded here: {', '.join(known)}" if known else f"`day0check baseline record {name} RUN_DIR` makes one"
        )
        raise UsageError(f"there is no baseline {name!r}", where=str(root), todo=todo)
    return Baseline(name, tuple(read_entry(file) for file in files))


def read_entry(file: Path) -> Entry:
    """One file of a baseline; it is never changed by reading. Raises InputError: truncated, newer schema, not one."""
    todo = "restore it from version control, or record it anew with --replace after moving it away"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise InputError(f"the baseline cannot be read (truncated?): {cause}", where=str(file), todo=todo) from cause
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        what = f"the baseline has schema_version {version}, this day0check reads up to {SCHEMA_VERSION}"
        raise InputError(what, where=str(file), todo="use the day0check that recorded it, or a newer one")
    try:
        if not isinstance(version, int):
            raise ValueError("key 'schema_version' is missing")
        entry = from_json(Entry, data)
        if set(entry.key) != set(KEY_PARTS):
            raise ValueError(f"the key must have {', '.join(KEY_PARTS)}")
    except ValueError as cause:
        raise InputError(f"not a baseline: {cause}", where=str(file), todo=todo) from cause
    return entry


def differing_parts(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [part for part in KEY_PARTS if to_json(a.get(part)) != to_json(b.get(part))]


def machine_median(times: Times) -> float:
    """Median of the machine's own speed over a run; 0 when it has no steps."""
    return median([s.machine_seconds for s in times.steps]) if times.steps else 0.0
