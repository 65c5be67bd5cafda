"""Runs a plan: the candidate in a process of its own, the reference one case behind it, every outcome on disk.

A case that kills its process, hangs or outgrows its memory ends as the record of that case; the remaining cases go on
in a new process. Torch is imported only by the workers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import psutil

from day0check.accelerated.parallel.layout import layout_of
from day0check.backends import loader
from day0check.errors import Day0Error, NothingSelected, UsageError
from day0check.probe.heartbeat import read as read_heartbeat
from day0check.probe.records import RecordError
from day0check.snapshot import case_directory
from day0check.types import RunCase
from day0check.worker.job import Job, RunRecord, error_from, is_operator_case, read_record, watched_s, write_record
from day0check.worker.process import Process, kill_all, signal_name

GIB = 1 << 30
_TICK_S = 0.05
_CLOSE_S = 10.0  # how long a worker may take to end after its last case


@dataclass(frozen=True)
class RunPlan:
    """What to run and within which limits. `out` must not hold a run already.

    `memory_limit_bytes`: resident bytes of the candidate's process and its children (None: `default_memory_limit`).
    `start_limit_s`: from the start of a process to its first case; `load_limit_s`: for loading the model.
    `max_deaths`: how many processes of the candidate may die before the remaining cases are left out. `witness`: keep
    this one call whole (`probe.witness.Witness`) in `candidate/witness`, and judge nothing.
    """

    cases: tuple[RunCase, ...]
    out: Path
    model_dir: str = ""
    backend: str = "accelerated"
    profile: str = "bf16"
    device: str = "cpu"
    ops: str | None = None
    layout: dict[str, Any] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    mode: Literal["judge", "full", "digest"] = "judge"
    byte_cap: int = GIB
    repeats: int = 1
    threads: int = 1
    reference: bool = True
    memory_limit_bytes: int | None = None
    start_limit_s: float = 180.0
    load_limit_s: float = 180.0
    reference_limit_s: float = 600.0
    max_deaths: int = 4
    witness: dict[str, Any] | None = None


@dataclass(frozen=True)
class CaseResult:
    """How a case ended. `reference` is None where nothing was compared. `directory` holds candidate/ and reference/."""

    case: RunCase
    directory: Path
    candidate: RunRecord
    reference: RunRecord | None = None


@dataclass(frozen=True)
class Progress:
    """`what`: "begin", "load", "loaded", "repeat", "extra" or "end" (then `record` is there). `done` of `total` cases
    have ended."""

    role: Literal["candidate", "reference"]
    what: str
    case: str
    done: int
    total: int
    record: RunRecord | None = None


class Interrupted(Day0Error):
    """The user ended the run; `results` are the cases that had ended."""

    def __init__(self, results: list[CaseResult], total: int, out: Path) -> None:
        super().__init__(
            f"interrupted: {len(results)} of {total} cases have ended and are recorded",
            where=str(out),
            todo="run the remaining cases by naming them, with another --out",
        )
        self.results = results


def default_memory_limit(device: str = "cpu", *, ranks: int = 1) -> int:
    """4 GiB (16 GiB where a device's libraries and pinned memory count) for each rank, or 60% of the memory if that is
    less."""
    return min((4 if device == "cpu" else 16) * GIB * ranks, int(0.6 * psutil.virtual_memory().total))


def default_out(root: Path = Path("reports")) -> Path:
    """A fresh directory named by the time in UTC."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    names = (stamp, *(f"{stamp}-{i}" for i in range(1, 1000)))
    return next(root / name for name in names if not (root / name).exists())


def prepare_out(out: Path) -> None:
    """Makes the output directory. Raises UsageError when it holds a run already or cannot be written."""
    if any((out / name).exists() for name in ("snapshots", "verdict.json", "jobs")):
        raise UsageError("this directory already holds a run", where=f"--out {out}", todo="give another directory")
    try:
        (out / "snapshots").mkdir(parents=True)
    except OSError as error:
        todo = "give a directory that can be written"
        raise UsageError(f"cannot be made: {error.strerror}", where=f"--out {out}", todo=todo) from error


def run(plan: RunPlan, progress: Callable[[Progress], None] = lambda _: None) -> list[CaseResult]:
    """Runs every case of the plan and gives their outcomes in order.

    Raises UsageError or InputError (what the user gave cannot be used), Interrupted, Day0Error (the harness or its disk
    failed). Whatever is raised, no process of ours stays behind and what was recorded stays readable.
    """
    if not plan.cases:
        raise NothingSelected("there is no case to run", todo="`day0check list cases` prints them")
    loader.parse(plan.backend)
    plan = replace(plan, ops=None if plan.ops is None else loader.check_operators_file(plan.ops))
    prepare_out(plan.out)
    session = _Session(plan, progress)
    try:
        with terminate_as_interrupt():
            session.run()
    except KeyboardInterrupt:
        kill_all(session.processes())
        waiting = set(session.candidate.queue)
        with contextlib.suppress(RecordError):  # a full disk must not hide that the run was ended
            session.give_up("interrupted by the user")
        ended = [r for r in session.results() if r.case not in waiting]
        raise Interrupted(ended, len(plan.cases), plan.out) from None
    except RecordError as error:
        todo = "make room on the disk, or give another --out, and run again"
        raise Day0Error(f"cannot be written: {error.strerror}", where=str(error.filename), todo=todo) from error
    finally:
        kill_all(session.processes())
    return session.results()


@contextlib.contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """SIGTERM (a CI system's time limit) ends a run as Ctrl-C does; signals belong to the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        as_ctrl_c = signal.getsignal(signal.SIGINT)
        if callable(as_ctrl_c):  # a running event loop has its own way; raised in a task it leaves a traceback
            as_ctrl_c(number, frame)
        else:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Session:
    """One run under way: a queue of cases per role, at most one process per role."""

    def __init__(self, plan: RunPlan, progress: Callable[[Progress], None]) -> None:
        self.plan, self.progress = plan, progress
        self.candidate = _Lane(plan, "candidate", deque(plan.cases))
        self.reference = _Lane(plan, "reference", deque())
        self.limit = plan.memory_limit_bytes or default_memory_limit(plan.device, ranks=layout_of(plan.layout).world)
        self.deaths, self.load_failed = 0, False

    def processes(self) -> list[Process | None]:
        return [self.candidate.process, self.reference.process]

    def run(self) -> None:
        while self.candidate.queue or self.reference.queue:
            self._turn_candidate()
            self._turn_reference()
            time.sleep(_TICK_S)
        for lane in (self.candidate, self.reference):
            if lane.process is not None:
                if lane.role == "reference":
                    lane.process.tell_no_more()
                self._finish(lane)

    def _finish(self, lane: _Lane) -> None:
        """Lets a worker end by itself; one that hangs after its last case is ended, all its outcomes are there."""
        if not lane.process.wait(_CLOSE_S):
            lane.process.show_stacks()
        lane.process.kill()
        for event in lane.process.events():
            if event["event"] == "error":
                raise error_from(event)
        lane.process = None

    # ---------------------------------------------------------------------------------------------- candidate

    def _turn_candidate(self) -> None:
        lane = self.candidate
        if not lane.queue:
            return
        if lane.process is None:
            if self.deaths > self.plan.max_deaths:
                self._leave_out(lambda case: True, f"not run: the candidate died {self.deaths} times before")
                return
            lane.start()
        code = lane.process.exit_code()  # before the events: what it said last is then among them
        for event in lane.read():
            self._hear(lane, event)
        if not lane.queue:
            return
        lane.weigh()
        if code is not None:
            self._died(*ended_by(code))
        elif lane.peak_rss_bytes > self.limit:
            self._died("memory", f"it held more than the limit of {self.limit / GIB:.3g} GiB")
        elif time.monotonic() > lane.deadline and time.monotonic() > lane.deadline + self._watched_s():
            lane.process.show_stacks()
            self._died("timeout", f"it took more than the limit of {lane.limit_s:g} s")

    def _watched_s(self) -> float:
        """What watching its case has cost the candidate: on a slow device the harness would fail it for that."""
        lane = self.candidate
        return watched_s(self.plan.out, lane.queue[0].id) if lane.stage == "run" else 0.0

    def _hear(self, lane: _Lane, event: dict[str, Any]) -> None:
        if event["event"] == "error":
            raise error_from(event)
        case = lane.queue[0]
        record = None
        if event["event"] == "end":
            record = read_record(case_directory(self.plan.out, case.id, lane.role))
            if lane.role == "candidate":
                record = self._with_process_facts(lane, case, record)
                if record.status == "finished" and self.plan.reference and not is_operator_case(case):
                    self.reference.queue.append(case)
            lane.queue.popleft()
        self._tell(lane, event["event"], case, record)

    def _tell(self, lane: _Lane, what: str, case: RunCase, record: RunRecord | None = None) -> None:
        done = len(self.plan.cases) - len(self.candidate.queue) if lane.role == "candidate" else lane.ended
        self.progress(Progress(lane.role, what, case.id, done, len(self.plan.cases), record))

    def _with_process_facts(self, lane: _Lane, case: RunCase, record: RunRecord) -> RunRecord:
        """Adds what only the runner sees: the log, its end when the case did not finish, memory with all children."""
        record = replace(
            record,
            peak_rss_bytes=max(record.peak_rss_bytes, lane.peak_rss_bytes),
            output=() if record.status == "finished" else lane.process.output(lane.log_begin),
            log=str(lane.process.log.relative_to(self.plan.out)),
        )
        write_record(case_directory(self.plan.out, case.id, "candidate"), record)
        return record

    def _died(self, status: str, how: str) -> None:
        """Records the end of the candidate's process as the outcome of its case, and clears the way for the rest."""
        lane, case = self.candidate, self.candidate.queue[0]
        lane.process.kill()
        directory = case_directory(self.plan.out, case.id, "candidate")
        beat = read_heartbeat(directory / "heartbeat")
        record = RunRecord(
            status,
            how if lane.stage == "run" else f"while {lane.stage_words()}: {how}",
            seconds=time.monotonic() - lane.since,
            last=None if beat is None else {"tap": beat.tap, "phase": beat.phase, "step": beat.step},
        )
        self._settle(case, record)
        self.deaths += 1
        if lane.stage == "start":
            self._leave_out(lambda c: True, "not run: the candidate died before its first case")
        elif lane.stage == "load":
            self._leave_out(lambda c: not is_operator_case(c), "not run: the candidate died while loading the model")
        lane.process = None

    def _settle(self, case: RunCase, record: RunRecord) -> None:
        lane = self.candidate
        if lane.process is not None:
            record = self._with_process_facts(lane, case, record)
        else:
            write_record(case_directory(self.plan.out, case.id, "candidate"), record)
        lane.queue.remove(case)
        self._tell(lane, "end", case, record)

    def _leave_out(self, which: Callable[[RunCase], bool], reason: str) -> None:
        for case in [c for c in self.candidate.queue if which(c)]:
            self._settle_unrun(case, reason)

    def _settle_unrun(self, case: RunCase, reason: str) -> None:
        record = RunRecord("unavailable", reason)
        write_record(case_directory(self.plan.out, case.id, "candidate"), record)
        self.candidate.queue.remove(case)
        self._tell(self.candidate, "end", case, record)

    # ---------------------------------------------------------------------------------------------- reference

    def _turn_reference(self) -> None:
        lane = self.reference
        if lane.process is None and (lane.queue or self._comparison_is_near()):
            lane.start()
        if not lane.queue:
            return
        lane.feed()
        code = lane.process.exit_code()
        for event in lane.read():
            self._hear(lane, event)
        if not lane.queue:
            return
        if code is not None:
            self._comparison_died(*ended_by(code))
        elif time.monotonic() > lane.deadline:
            lane.process.show_stacks()
            self._comparison_died("timeout", f"it took more than the limit of {lane.limit_s:g} s")

    def _comparison_is_near(self) -> bool:
        """Whether the candidate is at a case that will be compared: starting takes seconds, which pass meanwhile."""
        lane = self.candidate
        if not (self.plan.reference and lane.queue and lane.stage == "run"):
            return False
        return not is_operator_case(lane.queue[0])

    def _comparison_died(self, status: str, how: str) -> None:
        lane, case = self.reference, self.reference.queue[0]
        lane.process.kill()
        log = str(lane.process.log.relative_to(self.plan.out))
        record = RunRecord(status, f"the reference's process ended: {how}", output=lane.process.output(), log=log)
        write_record(case_directory(self.plan.out, case.id, "reference"), record)
        lane.queue.popleft()
        lane.ended += 1
        lane.process = None
        self._tell(lane, "end", case, record)

    # ------------------------------------------------------------------------------------------------ results

    def give_up(self, reason: str) -> None:
        """Gives every case that has no outcome one that says so."""
        for lane in (self.candidate, self.reference):
            for case in lane.queue:
                write_record(case_directory(self.plan.out, case.id, lane.role), RunRecord("unavailable", reason))

    def results(self) -> list[CaseResult]:
        found = []
        for case in self.plan.cases:
            directory = case_directory(self.plan.out, case.id, "candidate")
            record = read_record(directory) or RunRecord("unavailable", "not run")
            reference = read_record(case_directory(self.plan.out, case.id, "reference"))
            found.append(CaseResult(case, directory.parent, record, reference))
        return found


class _Lane:
    """The cases of one role that have no outcome yet, the process that works on the first of them, and its clock.

    `stage` is "start" (no case begun), "load", "run", "repeat" or "extra"; `since` and `limit_s` belong to the stage.
    """

    def __init__(self, plan: RunPlan, role: Literal["candidate", "reference"], queue: deque[RunCase]) -> None:
        self.plan, self.role, self.queue = plan, role, queue
        self.process: Process | None = None
        self.started, self.ended, self.log_begin, self.peak_rss_bytes = 0, 0, 0, 0
        self._fed: set[str] = set()
        self.extra = ""  # label of the further run that is being made
        self._enter("start")

    @property
    def deadline(self) -> float:
        return self.since + self.limit_s

    def _enter(self, stage: str) -> None:
        self.stage, self.since = stage, time.monotonic()
        run_limit_s = self.queue[0].time_limit_s if self.queue else self.plan.load_limit_s
        if self.role == "reference":
            run_limit_s = self.plan.reference_limit_s
        limits_s = {"start": self.plan.start_limit_s, "load": self.plan.load_limit_s}
        self.limit_s = limits_s.get(stage, run_limit_s)

    def stage_words(self) -> str:
        words = {"start": "starting", "load": "loading the model", "repeat": "running the case again, unobserved"}
        words["extra"] = f"making the further run {self.extra!r} of the case"
        return words.get(self.stage, "running the case")

    def start(self) -> None:
        name = f"{self.role}-{self.started}"
        self.started += 1
        cases = tuple(self.queue) if self.role == "candidate" else self.plan.cases
        self.process = Process(self._job(cases, name), name=name, directory=self.plan.out)
        self._fed, self.log_begin, self.peak_rss_bytes = set(), 0, 0
        self._enter("start")

    def _job(self, cases: tuple[RunCase, ...], name: str) -> Job:
        plan = self.plan
        return Job(
            role=self.role,
            out=str(plan.out.resolve()),
            events=str((plan.out / "jobs" / f"{name}.events.jsonl").resolve()),
            cases=cases,
            model_dir=plan.model_dir,
            backend=plan.backend,
            profile=plan.profile,
            ops=plan.ops,
            device=plan.device,
            layout=plan.layout,
            imports=plan.imports,
            mode=plan.mode,
            byte_cap=plan.byte_cap,
            repeats=plan.repeats,
            threads=plan.threads,
            parent=os.getpid(),
            witness=plan.witness,
        )

    def feed(self) -> None:
        """Tells a reference worker of the cases that the candidate has finished since. The time of one that waited for
        the first of them begins now."""
        for case in self.queue:
            if case.id not in self._fed:
                if case is self.queue[0]:
                    self._enter(self.stage)
                self._fed.add(case.id)
                self.process.tell(case.id)

    def weigh(self) -> None:
        self.peak_rss_bytes = max(self.peak_rss_bytes, self.process.rss_bytes())

    def read(self) -> Iterator[dict[str, Any]]:
        """The worker's new events, the clock set by each of them."""
        for event in self.process.events():
            if event["event"] == "begin":
                self.log_begin, self.peak_rss_bytes = event.get("log_bytes", 0), 0
            yield event
            if event["event"] == "end":
                self.ended += 1
            stage = {
                "begin": "run",
                "load": "load",
                "loaded": "run",
                "repeat": "repeat",
                "extra": "extra",
                "end": "run",
            }
            self.extra = event.get("label", "")
            self._enter(stage.get(event["event"], self.stage))


def ended_by(code: int) -> tuple[str, str]:
    """(status, how) of a worker that ended before its case did."""
    if code >= 0:
        return "aborted", f"its process ended with exit code {code} before the case had finished"
    hint = " (the system's way to end a process when memory runs out)" if -code == signal.SIGKILL else ""
    return "aborted", f"its process was ended by {signal_name(-code)}{hint}"
