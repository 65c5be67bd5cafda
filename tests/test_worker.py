"""The worker's own promises: our errors are never the candidate's, records are those of the case, operators are run."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from day0check.backends import loader
from day0check.errors import CaptureError, Day0Error, Unavailable, UsageError
from day0check.probe.recorder import Observer
from day0check.probe.records import Lines, RecordError
from day0check.snapshot import case_directory
from day0check.types import Outputs, Request, RunCase, Schedule, ScheduleEvent, Turn, from_json, to_json
from day0check.worker.candidate import checked_outputs, describe, last_beat, needs, peak_rss, run_candidate
from day0check.worker.job import Job, RunRecord, command, error_event, error_from, load_job, read_record, write_record
from day0check.worker.observe import Guard, Observation, memory_arguments, written_arguments
from day0check.worker.process import signal_name, tail

FAKES = Path(__file__).with_name("runner_candidates.py")


def case(name: str, **request) -> RunCase:
    return RunCase(name, (Request(f"{name}#1", (Turn((1, 2, 3)),), 1, **request),))


def job(tmp_path: Path, *cases: RunCase, backend: str = "Moody", **rest) -> Job:
    given = {"mode": "digest", "repeats": 0, **rest}
    events = str(tmp_path / "events.jsonl")
    return Job("candidate", str(tmp_path), events, cases, "", f"{FAKES}:{backend}", "bf16", **given)


def events(tmp_path: Path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]


def test_job_and_record_survive_json(tmp_path):
    """Catches a field that a worker would read as another value."""
    given = job(tmp_path, case("fake/nothing", forced=((1, 2),)), layout={"page": 64}, imports=("a",))
    assert from_json(Job, json.loads(json.dumps(to_json(given)))) == given
    record = RunRecord("memory", "m", 1.5, 2, {"tap": "a"}, ("x",), links={"checked": 1}, repeat_equal=False)
    write_record(tmp_path / "c", record)
    assert read_record(tmp_path / "c") == record
    assert read_record(tmp_path / "d") is None
    (tmp_path / "c" / "run.json").write_text('{"status": "splendid"}')
    with pytest.raises(Day0Error, match="splendid"):
        read_record(tmp_path / "c")
    with pytest.raises(Day0Error, match="absent"):
        load_job(str(tmp_path / "absent"))


def test_a_full_disk_is_ours_and_names_the_file(tmp_path):
    """Catches a full disk told as a failure of the candidate, and a run that goes on without its records."""
    directory = case_directory(tmp_path, "fake/nothing", "candidate")
    directory.mkdir(parents=True)
    (directory / "digests.jsonl").symlink_to("/dev/full")
    path = tmp_path / "job.json"
    path.write_text(json.dumps(to_json(job(tmp_path, case("fake/nothing"), case("fake/garbage")))))
    done = subprocess.run(command(path), check=False, capture_output=True, text=True)
    assert done.returncode == 3
    last = events(tmp_path)[-1]
    assert last["event"] == "error"
    assert "No space left" in last["what"]
    assert last["where"].endswith("digests.jsonl")
    assert "make room" in last["todo"]
    assert not (directory / "run.json").exists()
    assert "Traceback" in done.stderr


@pytest.mark.parametrize("backend", ["Moody", "Swallows"])
def test_an_observer_of_ours_that_fails_is_never_the_candidates_fault(tmp_path, monkeypatch, backend):
    """Catches a bug of the judge that is told as a bug of the stack, also where it is swallowed."""

    class Broken(Observer):
        def after(self, call, token, results):
            raise ZeroDivisionError("ours")

    real = Observation.__init__

    def with_broken(self, job, case, directory):
        real(self, job, case, directory)
        self.observers = (*self.observers, Guard(Broken()))

    monkeypatch.setattr(Observation, "__init__", with_broken)
    lines = Lines(tmp_path / "events.jsonl")
    with pytest.raises(CaptureError, match=r"Broken failed at layers\.00\.embed\.tokens: ZeroDivisionError: ours"):
        run_candidate(job(tmp_path, case("fake/nothing"), backend=backend), lines)
    lines.close()


def test_a_guard_keeps_what_the_candidate_swallowed():
    class Broken(Observer):
        def end_step(self, step):
            raise RecordError(28, "No space left on device", "/x")

    guard = Guard(Broken())
    with pytest.raises(RecordError):
        guard.end_step(0)
    assert isinstance(guard.fault, RecordError)
    guard.end_step(1)  # told once


def test_errors_cross_the_border():
    """Catches a wrong exit code for what the user gave."""
    told = error_from(error_event(UsageError("what", where="where", todo="todo")))
    assert isinstance(told, UsageError)
    assert (told.what, told.where, told.todo) == ("what", "where", "todo")
    harness = error_from(error_event(RuntimeError("oops")))
    assert harness.exit_code == 3
    assert "oops" in harness.what
    assert describe(Unavailable("a\nb", where="c")) == "c: a b"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (case("text/a"), set()),
        (case("operators/contracts"), {"operators"}),
        (case("text/a", forced=((1,),)), {"forced_tokens"}),
        (replace(case("text/a"), schedule=Schedule(chunk=4)), {"chunk"}),
        (replace(case("text/a"), schedule=Schedule(events=(ScheduleEvent(1, "preempt", "r"),))), {"preempt"}),
        (replace(case("text/a"), requests=case("a/a").requests + case("b/b").requests), {"batch"}),
        (RunCase("i/i", (Request("i", (Turn((1,), ("x.png",)),)),)), {"images"}),
    ],
)
def test_what_a_case_needs(given, wanted):
    """Catches a schedule that a backend ignores and passes."""
    assert needs(given) == wanted


def test_outputs_of_any_shape_are_read_or_refused():
    class Duck:
        sequences = {"a": torch.tensor([1, 2])}  # noqa: RUF012
        generated = {"a": [[1, 2]]}  # noqa: RUF012

    assert checked_outputs(Duck()) == Outputs({"a": (1, 2)}, {"a": ((1, 2),)}, {})
    for wrong in (None, {"sequences": {}}, "text"):
        with pytest.raises(TypeError, match="must return Outputs"):
            checked_outputs(wrong)


def test_memory_of_operators_is_known():
    """Catches a cache that links would take for a result."""
    assert memory_arguments()["kv.write"] == {"pool", "0"}
    assert memory_arguments()["moe.convert"] == {"payload_out", "scale_out"}
    assert "norm.rms" not in memory_arguments()
    assert written_arguments()["residual.store"] == {"bank", "0"}
    assert "kv.gather" not in written_arguments()


def test_peak_memory_is_that_of_the_case():
    """Catches a peak that is the whole process's: later cases would look as large as the largest before them."""
    from day0check.worker.candidate import reset_peak_rss

    held = torch.ones(64 << 20, dtype=torch.uint8)
    before = peak_rss()
    del held
    reset_peak_rss()
    assert peak_rss() < before


def test_the_end_of_a_log_is_printable(tmp_path):
    """Catches terminal escapes of a candidate in a report, and a log of gigabytes read whole."""
    log = tmp_path / "log"
    log.write_bytes(b"old\n" + b"x" * 100_000 + b"\n\n\x1b[31mred\xff\nlast\n")
    assert tail(log, 0, 2) == ("\ufffd[31mred\ufffd", "last")
    assert tail(log, log.stat().st_size - 5, 9) == ("last",)
    assert max(map(len, tail(log, 0, 9))) == 400
    assert signal_name(6) == "SIGABRT"
    assert signal_name(999) == "signal 999"
    assert last_beat(tmp_path) is None


def test_backend_sources(tmp_path):
    """Catches names that are resolved by importing what the command line must not import."""
    assert loader.parse("accelerated").module == "day0check.backends.accelerated"
    file = tmp_path / "b.py"
    file.write_text("class Mine:\n    pass\n")
    assert loader.parse(f"{file}:Mine") == loader.Source("Mine", file=str(file))
    for wrong in (f"{file}:", f"{file}:no-name", f"{file}", "", f"{tmp_path}:Mine"):
        with pytest.raises(UsageError):
            loader.parse(wrong)
    file.write_text("import nothing_of_that_name\n")
    with pytest.raises(Day0Error, match=r"b\.py:1.*nothing_of_that_name") as raised:
        loader.make(f"{file}:Mine")
    assert raised.value.exit_code == 2
    assert loader.nearest("acelerated", loader.BACKENDS) == "did you mean 'accelerated'?"
