"""A candidate that is cut over ranks: a process for each, case after case, and their records joined into one.

The launcher is the worker that the runner knows. It holds the store through which the ranks find each other, lets all
of them begin a case together, and ends all when one dies, fails or hangs: what it left is named with its rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from day0check.accelerated.parallel.layout import layout_of, place_experts
from day0check.compare.merge import merge_case
from day0check.compare.unobserved import worst
from day0check.contracts import CONTRACTS
from day0check.env import TOPOLOGY, TORCH_FLAGS
from day0check.probe.fused_sums import REDUCE
from day0check.probe.heartbeat import Beat, read
from day0check.probe.records import Lines, replace_json
from day0check.snapshot import case_directory
from day0check.types import RunCase, to_json
from day0check.worker.job import Job, RunRecord, error_from, read_record, watched_s, write_record
from day0check.worker.process import Process, kill_all, signal_name

HOST = "127.0.0.1"
MOST_DEATHS = 4
_TICK_S, _GRACE_S, _CLOSE_S = 0.02, 3.0, 10.0
_RELAYED = ("load", "loaded", "repeat", "extra")


def is_launcher(job: Job) -> bool:
    """Whether a worker starts ranks: its job is of several and it is none of them."""
    return job.role == "candidate" and not job.gated and layout_of(job.layout).world > 1


def gated(job: Job, lines: Iterable[str]) -> Iterator[RunCase]:
    """The cases of a rank, each when the launcher names it."""
    cases = {case.id: case for case in job.cases}
    for line in lines:
        yield cases[line.rstrip("\n")]


@dataclass(frozen=True)
class _Stop:
    """Why a case ended before all ranks had ended it."""

    rank: int
    status: str
    message: str


class _Crew:
    """The processes of all ranks for some cases; `ended` are those that have ended the present case."""

    def __init__(self, job: Job, cases: tuple[RunCase, ...], start: int) -> None:
        import torch.distributed as dist

        self.job, self.size = job, layout_of(job.layout).world
        self.store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self.out, self.killed = Path(job.out), False
        self.processes: list[Process] = []
        for rank in range(self.size):
            name = f"{Path(job.events).name.partition('.')[0]}-{start}-rank-{rank}"
            folder = self.out / "ranks" / str(rank)
            folder.mkdir(parents=True, exist_ok=True)
            events = str(self.out / "jobs" / f"{name}.events.jsonl")
            (self.out / "jobs").mkdir(exist_ok=True)
            layout = {**job.layout, "rank": rank, "world": self.size, "store_host": HOST, "store_port": self.store.port}
            device = device_of_rank(job.device, rank)
            mine = replace(
                job,
                out=str(folder),
                events=events,
                cases=cases,
                layout={**layout, "device": device},
                device=device,
                parent=os.getpid(),
                gated=True,
            )
            self.processes.append(Process(mine, name=name, directory=self.out))

    def folder(self, rank: int, case: RunCase) -> Path:
        return case_directory(self.out / "ranks" / str(rank), case.id, "candidate")

    def run(self, case: RunCase, events: Lines) -> _Stop | None:
        """Runs one case on all ranks; what stopped it, None when every rank has ended it with a record of its own.

        The case begins, and its time, when every rank has begun it. Raises what is no fault of the candidate's.
        """
        for process in self.processes:
            process.tell(case.id)
        begun: set[int] = set()
        ended: set[int] = set()
        since, limit_s, grace_until = time.monotonic(), case.time_limit_s, None
        stages = dict.fromkeys(range(self.size), "start")
        while len(ended) < self.size:
            for rank, process in enumerate(self.processes):
                code = process.exit_code()  # before the events: what it said last is then among them
                for event in process.events():
                    if event["event"] == "error":
                        raise error_from(event)
                    stages[rank] = event["event"]
                    if event["event"] == "begin":
                        begun.add(rank)
                        if len(begun) == self.size:
                            events.write({"event": "begin", "case": case.id, "log_bytes": os.fstat(2).st_size})
                            since = time.monotonic()
                    if event["event"] in _RELAYED:
                        since = time.monotonic()
                        if rank == 0:
                            events.write(event)
                    if event["event"] == "end":
                        ended.add(rank)
                        record = read_record(self.folder(rank, case))
                        if record is None or record.status != "finished":
                            grace_until = grace_until or time.monotonic() + _GRACE_S
                if code is not None and rank not in ended:
                    return _Stop(rank, "aborted", ended_by(code))
            if grace_until is not None and time.monotonic() > grace_until:
                return self._failed(case, ended)
            now = set(stages.values())
            late = time.monotonic() - since - limit_s + min(2.0, 0.2 * limit_s)
            # the beats of the run stay there while nobody watches; the runner leaves them out, too
            watched = 0.0 if late <= 0 or {"repeat", "extra"} & now else watched_s(self.out, case.id)
            if late > watched and not {"start", "load"} & now:
                return self._late(case, ended, limit_s)
            time.sleep(_TICK_S)
        return None

    def _failed(self, case: RunCase, ended: set[int]) -> _Stop:
        """A rank failed and others wait for it."""
        for rank in sorted(ended):
            record = read_record(self.folder(rank, case))
            if record is not None and record.status != "finished":
                return _Stop(rank, record.status, record.message)
        return _Stop(min(ended), "failed", "it left no record")

    def _late(self, case: RunCase, ended: set[int], limit_s: float) -> _Stop:
        for process in self.processes:
            process.show_stacks(wait_s=0.05)
        beats = {rank: read(self.folder(rank, case) / "heartbeat") for rank in range(self.size) if rank not in ended}
        rank, waits = laggard(beats)
        tap = beats[rank].tap if beats[rank] is not None else "before its first operator"
        text = f"it took more than the limit of {limit_s:g} s at {tap}"
        return _Stop(rank, "timeout", f"{text}; rank {waits[0]} waits for it" if waits else text)

    def print_log(self, rank: int) -> None:
        """Shows the last lines of a rank in the launcher's own log, which the runner keeps."""
        for line in self.processes[rank].output():
            print(f"rank {rank}: {line}", file=sys.stderr, flush=True)

    def kill(self) -> None:
        self.killed = True
        for process in self.processes:
            process.strike()
        kill_all(self.processes)

    def close(self) -> None:
        """Lets the ranks end by themselves, and ends those that do not."""
        for process in self.processes:
            process.tell_no_more()
        until = time.monotonic() + _CLOSE_S
        for process in self.processes:
            process.wait(max(0.0, until - time.monotonic()))
        kill_all(self.processes)


def run_ranks(job: Job, events: Lines) -> None:
    """Runs the cases of a job on all ranks in order. Raises the errors that are the user's or ours."""
    queue, crew, starts = list(job.cases), None, 0
    try:
        while queue:
            case = queue[0]
            if crew is None:
                if starts:
                    events.write({"event": "load"})  # what follows is a start, and not the time of the case
                crew = _Crew(job, tuple(queue), starts)
                starts += 1
            record = _run_case(crew, case, events, starts)
            write_record(case_directory(job.out, case.id, "candidate"), record)
            if record.status not in ("finished", "unavailable"):
                crew.kill()
            if crew.killed:
                crew = None
            events.write({"event": "end", "case": case.id})
            queue.pop(0)
            if crew is None and starts > MOST_DEATHS:
                _leave_out(job, queue, events)
                return
        if crew is not None:
            crew.close()
            _gather_facts(crew)
            crew = None
    finally:
        if crew is not None:
            crew.kill()


def _leave_out(job: Job, queue: list[RunCase], events: Lines) -> None:
    for case in queue:
        events.write({"event": "begin", "case": case.id, "log_bytes": os.fstat(2).st_size})
        reason = f"not run: ranks had to be started {MOST_DEATHS + 1} times before"
        write_record(case_directory(job.out, case.id, "candidate"), RunRecord("unavailable", reason))
        events.write({"event": "end", "case": case.id})


def _run_case(crew: _Crew, case: RunCase, events: Lines, starts: int) -> RunRecord:
    """The record of one case, its merged snapshot on disk."""
    stop = crew.run(case, events)
    into = case_directory(crew.out, case.id, "candidate")
    into.mkdir(parents=True, exist_ok=True)
    folders = [crew.folder(rank, case) for rank in range(crew.size)]
    if stop is not None:
        crew.kill()
        crew.print_log(stop.rank)
    record = joined_record(folders, stop)
    layout = layout_of(crew.job.layout)
    facts = {"layout": to_json(layout), "starts": starts, "experts": held_experts(crew.job)}
    there = [folder for folder in folders if (folder / "run.json").is_file() or (folder / "heartbeat").is_file()]
    if len(there) == len(folders) and record.status != "unavailable":
        finished = record.status == "finished"
        claims = {"profile": crew.job.profile, "expert_parallel": layout.expert > 1}
        merge_case(folders, into, facts=facts, finished=finished, **claims)
    _keep_witness(folders, into, first=int(crew.job.layout.get("witness_rank", 0)))
    return record


def held_experts(job: Job) -> list[list[int]] | None:
    """The experts that each rank must hold, in the order of its stacks; None without expert parallelism."""
    layout = layout_of(job.layout)
    if layout.expert == 1 or not job.model_dir:
        return None
    from reference.weights import Checkpoint

    moe = Checkpoint(job.model_dir).config.moe
    if moe is None:
        return None
    placement = place_experts(moe.experts, layout.expert, redundant=layout.redundant)
    return [list(placement.held_by(rank)) for rank in range(layout.world)]


def joined_record(folders: list[Path], stop: _Stop | None = None) -> RunRecord:
    """The record of all ranks as one: the worst status, with the rank that had it."""
    records = [read_record(folder) for folder in folders]
    size = len(records)
    known = [r for r in records if r is not None]
    totals: dict[str, Any] = {
        "ranks": size,
        "seconds": max((r.seconds for r in known), default=0.0),
        "peak_rss_bytes": sum(r.peak_rss_bytes for r in known),
        "links": {key: sum(r.links.get(key, 0) for r in known) for key in sorted({k for r in known for k in r.links})},
        "captured_bytes": sum(r.captured_bytes for r in known),
        "dropped_bytes": sum(r.dropped_bytes for r in known),
    }
    if stop is None:
        bad = [(rank, r) for rank, r in enumerate(records) if r is None or r.status != "finished"]
        if not bad:
            equal = [r.repeat_equal for r in known]
            together = None if None in equal else all(equal)
            return replace(known[0], **totals, repeat_equal=together, unobserved=worst([r.unobserved for r in known]))
        rank, record = bad[0]
        stop = (
            _Stop(rank, "failed", "it left no record") if record is None else _Stop(rank, record.status, record.message)
        )
    beat, own = read(folders[stop.rank] / "heartbeat"), records[stop.rank]
    at = None if beat is None else {"tap": beat.tap, "phase": beat.phase, "step": beat.step}
    first = next((r for r in records if r is not None), RunRecord("failed"))
    return RunRecord(
        stop.status,
        f"rank {stop.rank} of {size}: {stop.message}",
        last=own.last if own is not None and own.last is not None else at,
        capabilities=first.capabilities,
        replaced=first.replaced,
        fused=first.fused,
        rank=stop.rank,
        **totals,
    )


def laggard(beats: dict[int, Beat | None]) -> tuple[int, list[int]]:
    """(the rank that holds the others up, those that wait): it is in an operator of its own while they wait in one of
    all, or it is the one that came least far."""
    waits = [rank for rank, beat in beats.items() if beat is not None and _is_joined(beat.tap)]
    busy = [rank for rank in beats if rank not in waits]
    candidates = busy or list(beats)
    rank = min(candidates, key=lambda r: (0 if beats[r] is None else beats[r].beats, r))
    return rank, [w for w in waits if w != rank]


def _is_joined(tap: str) -> bool:
    return REDUCE in tap or any(contract.joined and contract.name in tap for contract in CONTRACTS.values())


def ended_by(code: int) -> str:
    """How a rank's process ended, as a sentence about it."""
    if code >= 0:
        return f"its process ended with exit code {code} before the case had finished"
    hint = " (the system's way to end a process when memory runs out)" if -code == signal.SIGKILL else ""
    return f"its process was ended by {signal_name(-code)}{hint}"


def device_of_rank(device: str, rank: int) -> str:
    """The device of a rank: one each of the kind that was asked for; a CPU is shared."""
    kind = device.split(":")[0]
    return device if kind == "cpu" else f"{kind}:{rank}"


def _keep_witness(folders: list[Path], into: Path, *, first: int) -> None:
    """The one call that was kept whole, of rank `first`, or of another one that has it."""
    for folder in (folders[first], *folders):
        if (folder / "witness").is_dir() and not (into / "witness").exists():
            shutil.copytree(folder / "witness", into / "witness")


def _gather_facts(crew: _Crew) -> None:
    """What ranks say of themselves when they end: where they ran, and the flags of their torch."""
    ranks = crew.out / "ranks"
    places = []
    for rank in range(crew.size):
        with contextlib.suppress(FileNotFoundError):
            places.append(json.loads((ranks / str(rank) / "place.json").read_text(encoding="utf-8")))
    replace_json(crew.out / TOPOLOGY, places)
    if (ranks / "0" / TORCH_FLAGS).is_file():
        shutil.copyfile(ranks / "0" / TORCH_FLAGS, crew.out / TORCH_FLAGS)


def run_rank(job: Job, events: Lines, lines: Iterable[str]) -> None:
    """One rank: its cases as the launcher names them. Raises the errors that are the user's or ours."""
    import torch

    from day0check.accelerated.parallel.start_up import place_of
    from day0check.worker.candidate import run_candidate

    replace_json(Path(job.out) / "place.json", place_of(int(job.layout["rank"]), torch.device(job.device)))
    run_candidate(job, events, gated(job, lines))
