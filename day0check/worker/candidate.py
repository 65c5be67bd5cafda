"""The candidate's side of a run: one backend, loaded once, and every case with its outcome on disk before the next."""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from day0check.backends import loader
from day0check.compare.cost import Costs, write_costs
from day0check.compare.unobserved import unobserved_figures, worst
from day0check.contracts.profiles import profile_named
from day0check.env import TORCH_FLAGS
from day0check.errors import Day0Error, InputError, Unavailable, UsageError
from day0check.probe.final_logits import FinalLogits
from day0check.probe.heartbeat import Heartbeat, read
from day0check.probe.recorder import Recorder
from day0check.probe.records import Lines, RecordError, replace_json
from day0check.probe.timing import TimingRecorder
from day0check.snapshot import case_directory
from day0check.types import Outputs, Request, RunCase, Schedule, to_json
from day0check.worker import costs
from day0check.worker.extra import make_run, runs_of
from day0check.worker.job import Job, RunRecord, RunStatus, is_operator_case, write_record
from day0check.worker.observe import Observation
from day0check.worker.torch_flags import torch_flags

_OURS = (UsageError, InputError, RecordError)


@dataclass(frozen=True)
class _Ending:
    """How an observed run ended. `last`: the call that ended it, where that is not the last one that began."""

    status: RunStatus
    message: str = ""
    outputs: Outputs | None = None
    missing: tuple[str, ...] = ()
    last: dict[str, Any] | None = None


class NotLoaded(Exception):
    """The model could not be loaded; `record` is the outcome of every case that needs it."""

    def __init__(self, record: RunRecord) -> None:
        super().__init__(record.message)
        self.record = record


class Candidate:
    """A backend with the operators file laid over it. `load` happens at the first case that needs a model."""

    def __init__(self, job: Job, events: Lines) -> None:
        self.job, self.events = job, events
        self.backend = loader.make(job.backend)
        self.table = self.backend.operators()
        self.replaced: tuple[str, ...] = ()
        if job.ops is not None:
            declared = loader.read_operators(job.ops)
            loader.lay_over(self.table, declared, path=job.ops, backend=job.backend)
            self.replaced = tuple(sorted({r.name for r in declared}))
        self.profile = profile_named(job.profile)
        self._loaded: bool | NotLoaded = False

    def load(self) -> None:
        """Loads the model once. Raises NotLoaded, also for every later case, or the errors that are the user's."""
        if isinstance(self._loaded, NotLoaded):
            raise self._loaded
        if self._loaded:
            return
        self.events.write({"event": "load"})
        try:
            self.backend.load(self.job.model_dir, self.profile.base, self.job.device, dict(self.job.layout))
        except _OURS:
            raise
        except (Exception, SystemExit) as error:
            from reference.errors import CheckpointError

            if isinstance(error, CheckpointError):
                raise InputError(error.what, where=error.where, todo=error.todo) from error
            traceback.print_exc()
            status = "unavailable" if isinstance(error, Unavailable) else "failed"
            self._loaded = NotLoaded(RunRecord(status, f"while loading the model: {describe(error)}"))
            raise self._loaded from error
        self._loaded = True
        self.events.write({"event": "loaded"})

    def capabilities(self) -> tuple[str, ...]:
        return tuple(sorted(self.backend.capabilities()))

    def lacks(self, case: RunCase) -> list[str]:
        """The capabilities that a case needs and the backend does not have."""
        wanted = needs(case) | ({"rank_taps"} if self.job.gated else set())
        return sorted(wanted - set(self.backend.capabilities()))

    def run_case(self, case: RunCase) -> RunRecord:
        """Runs one case and leaves its files. Raises only what is not the candidate's fault."""
        if is_operator_case(case) and self.table is None:
            return RunRecord("unavailable", "the backend has no table of operators to run")
        if missing := self.lacks(case):
            return RunRecord("unavailable", f"the backend has no {', '.join(missing)}, which this case needs")
        if not is_operator_case(case):
            try:
                self.load()
            except NotLoaded as error:
                return error.record
        return self._observed(case, case_directory(self.job.out, case.id, "candidate"))

    def _run_operators(self, recorder: Recorder) -> Any:
        from day0check.backends.operators import run_operators

        return run_operators(self.table, recorder, self.profile, device=self.job.device)

    def _observed(self, case: RunCase, directory: Path) -> RunRecord:
        reset_peak_rss()
        observation = Observation(self.job, case, directory)
        heartbeat = Heartbeat(directory / "heartbeat")
        recorder = Recorder(observation.observers, heartbeat)
        begin = time.perf_counter()
        try:
            ending = self._execute(case, recorder, observation)
        finally:
            observation.close()
            heartbeat.close()
        record = RunRecord(
            ending.status,
            ending.message,
            seconds=time.perf_counter() - begin,
            last=ending.last or last_beat(directory),
            missing=ending.missing,
            links=dict(observation.provenance.links),
            captured_bytes=observation.capture.bytes_kept if observation.capture else 0,
            dropped_bytes=observation.capture.bytes_dropped if observation.capture else 0,
        )
        if ending.outputs is not None:
            replace_json(directory / "outputs.json", to_json(ending.outputs))
            status, message, found = self._repeat(case, directory, ending.outputs, observation.final)
            record = replace(record, status=status, message=message, **found)
            if status == "finished":
                self._extra(case, directory, ending.outputs)
                self._costs(case, directory)
        return replace(record, peak_rss_bytes=peak_rss())

    def _execute(self, case: RunCase, recorder: Recorder, observation: Observation) -> _Ending:
        """Runs the case and says how it ended. Raises only what is not the candidate's fault."""
        try:
            with torch.no_grad():
                if is_operator_case(case):
                    ending = self._run_operators(recorder)
                else:
                    outputs = checked_outputs(self.backend.run(case.requests, case.schedule, recorder))
                    recorder.end_case()
                    ending = _Ending("finished", outputs=outputs)
            observation.raise_faults()
            return ending
        except RecordError:
            raise
        except (Exception, SystemExit) as error:
            observation.raise_faults()
            traceback.print_exc()
            if not isinstance(error, Unavailable):
                with contextlib.suppress(Exception):  # what was pooled before it fell is worth a judgement, if it can
                    recorder.end_case()
            return _Ending("unavailable" if isinstance(error, Unavailable) else "failed", describe(error))

    def _run_operators(self, recorder: Recorder) -> _Ending:
        from day0check.backends.operators import run_operators

        called = run_operators(self.table, recorder, self.profile, device=self.job.device)
        if not called.raised:
            return _Ending("finished", missing=called.missing)
        tap, error = called.raised[0]
        message = f"{len(called.raised)} of {called.calls} calls raised, the first {tap}: {error}"
        last = {"tap": tap, "phase": "prefill", "step": 0}
        return _Ending("failed", message, missing=called.missing, last=last)

    def _repeat(
        self, case: RunCase, directory: Path, outputs: Outputs, observed: FinalLogits | None
    ) -> tuple[str, str, dict[str, Any]]:
        """Runs the case again unobserved for its times; (status, message, what of the record says whether tokens and
        logits were the same)."""
        equal, figures = None, []
        for _ in range(self.job.repeats):
            self.events.write({"event": "repeat", "case": case.id})
            final = FinalLogits()
            recorder = TimingRecorder(self.job.device, final=final)
            try:
                with torch.no_grad():
                    again = checked_outputs(self.backend.run(case.requests, case.schedule, recorder))
            except RecordError:
                raise
            except (Exception, SystemExit) as error:
                traceback.print_exc()
                return "failed", f"when the same case was run again, unobserved: {describe(error)}", {}
            equal = again == outputs and equal is not False
            if observed is not None:
                figures.append(unobserved_figures(observed, final, outputs.sequences, again.sequences))
            recorder.write(directory / "timing.jsonl")
        return "finished", "", {"repeat_equal": equal, "unobserved": worst(figures)}

    def _extra(self, case: RunCase, directory: Path, outputs: Outputs) -> None:
        """The further runs that the checks of the case compare with the one that was judged."""
        for run in () if is_operator_case(case) or self.job.witness else runs_of(self.job, case, outputs):
            self.events.write({"event": "extra", "case": case.id, "label": run.label})
            lacking = self.lacks(replace(case, requests=run.requests, schedule=run.schedule))

            def execute(requests: tuple[Request, ...], schedule: Schedule, recorder: Recorder) -> Outputs:
                return checked_outputs(self.backend.run(requests, schedule, recorder))

            seen = {"lacking": lacking, "byte_cap": self.job.byte_cap, "of_rank": self.job.gated}
            make_run(run, directory, execute, table=self.table, **seen)

    def _costs(self, case: RunCase, directory: Path) -> None:
        """The sweep of the cost check, where the case asks for it; what the candidate raises is why there is none."""
        if costs.CHECK not in case.checks or is_operator_case(case) or self.job.witness:
            return
        from reference.weights import Checkpoint

        def execute(requests: tuple[Request, ...], schedule: Schedule, recorder: Recorder) -> Outputs:
            with torch.no_grad():
                return checked_outputs(self.backend.run(requests, schedule, recorder))

        self.events.write({"event": "extra", "case": case.id, "label": costs.CHECK})
        positions = Checkpoint(self.job.model_dir).config.max_positions
        try:
            costs.measure_costs(execute, case, directory, positions=positions, device=self.job.device)
        except RecordError:
            raise
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            write_costs(directory, Costs(missing=f"when its sweep was run: {describe(error)}"))


def run_candidate(job: Job, events: Lines, cases: Iterable[RunCase] | None = None) -> None:
    """Runs the cases of a job in order, or `cases` of them as they come. Raises the errors that are the user's or ours,
    never the candidate's."""
    for module in job.imports:
        try:
            importlib.import_module(module)
        except Exception as error:
            todo = "give the name of a module of this interpreter"
            raise UsageError(f"cannot be imported: {describe(error)}", where=f"--import {module}", todo=todo) from error
    profile_named(job.profile)
    candidate, reason = None, ""
    try:
        candidate = Candidate(job, events)
    except Unavailable as error:
        reason = describe(error)
    for case in job.cases if cases is None else cases:
        events.write({"event": "begin", "case": case.id, "log_bytes": printed_bytes()})
        directory = case_directory(job.out, case.id, "candidate")
        directory.mkdir(parents=True, exist_ok=True)
        told = to_json(candidate.run_case(case) if candidate else RunRecord("unavailable", reason))
        if candidate is not None:
            told |= {"capabilities": list(candidate.capabilities()), "replaced": list(candidate.replaced)}
            told |= {"fused": {} if candidate.table is None else dict(candidate.table.fused)}
        write_record(directory, RunRecord(**told))
        events.write({"event": "end", "case": case.id})
    replace_json(Path(job.out) / TORCH_FLAGS, torch_flags(job.device))
    if candidate is not None:
        try:
            candidate.backend.close()
        except Exception:
            traceback.print_exc()  # every case has its outcome; how the backend goes to sleep is not one of them


def needs(case: RunCase) -> set[str]:
    """The capabilities that a case asks of a backend."""
    wanted = {"operators"} if is_operator_case(case) else set()
    if case.schedule.chunk is not None:
        wanted.add("chunk")
    if len(case.requests) > 1:
        wanted.add("batch")
    wanted |= {event.do for event in case.schedule.events}
    asked = {"mixed": case.schedule.mixed, "prefix": case.schedule.prefix_cache, "offload": case.schedule.host_pages}
    asked |= {"copies": case.schedule.copies}
    asked |= {"memory": case.schedule.memory, "fixed_rows": case.schedule.fixed_rows}
    asked |= {"prefix_workspace": case.schedule.prefix_workspace}
    wanted |= {name for name, wish in asked.items() if wish}
    if any(turn.images for request in case.requests for turn in request.turns):
        wanted.add("images")
    if any(request.forced for request in case.requests):
        wanted.add("forced_tokens")
    return wanted


def checked_outputs(outputs: Any) -> Outputs:
    """What `run` gave, as Outputs; a duck-typed backend may give any object with the same three fields."""
    if isinstance(outputs, Outputs):
        return outputs
    try:
        return Outputs(
            {str(k): tuple(int(t) for t in v) for k, v in outputs.sequences.items()},
            {str(k): tuple((int(a), int(b)) for a, b in v) for k, v in outputs.generated.items()},
            {str(k): str(v) for k, v in getattr(outputs, "finish", {}).items()},
        )
    except (AttributeError, TypeError, ValueError) as error:
        raise TypeError(f"run() must return Outputs (sequences, generated, finish): {error}") from error


def describe(error: BaseException) -> str:
    """Type and text of an exception in one line; those of ours carry their own place."""
    text = str(error) if isinstance(error, Day0Error) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


def last_beat(directory: Path) -> dict[str, Any] | None:
    """The last operator call that had begun, as it stands in run.json."""
    beat = read(directory / "heartbeat")
    return None if beat is None else {"tap": beat.tap, "phase": beat.phase, "step": beat.step}


def printed_bytes() -> int:
    """How long the log is that this process prints into: what follows belongs to the case that begins."""
    return os.fstat(2).st_size


def reset_peak_rss() -> None:
    """Lets the kernel's high-water mark of this process begin anew, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Bytes of the high-water mark since `reset_peak_rss`; of the whole process where the system cannot say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
