"""Each way for a candidate to die gives its status, and every other case finishes."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from day0check.errors import ExitCode, NothingSelected, UsageError
from day0check.runner import RunPlan, _Lane, default_memory_limit, default_out, prepare_out, run
from day0check.snapshot import case_directory, read_measures
from day0check.types import Request, RunCase, Schedule, Turn

FAKES = Path(__file__).with_name("runner_candidates.py")


def case(what: str, time_limit_s: float = 30.0, **rest) -> RunCase:
    name = f"fake/{what}"
    return RunCase(name, (Request(f"{name}#1", (Turn((1, 2, 3)),), 1),), time_limit_s=time_limit_s, **rest)


def plan(tmp_path: Path, *cases: RunCase, backend: str = "Moody", **rest) -> RunPlan:
    rest = {"mode": "digest", "reference": False, "repeats": 0, "memory_limit_bytes": 2 << 30, **rest}
    return RunPlan(cases, tmp_path / "out", backend=f"{FAKES}:{backend}", **rest)


def statuses(results) -> dict[str, str]:
    return {r.case.id.removeprefix("fake/"): r.candidate.status for r in results}


def test_each_death_has_its_status_and_the_other_cases_finish(tmp_path):
    """Catches a death that takes other cases along, is not recorded, or is recorded as another one."""
    cases = (
        case("nothing"),
        case("abort"),
        case("garbage"),
        case("exit"),
        case("raise"),
        case("sys_exit"),
        case("unavailable"),
        case("sleep", time_limit_s=0.7),
        case("disk_of_its_own"),
    )
    ended = []
    results = run(plan(tmp_path, *cases), lambda p: ended.append(p.case) if p.what == "end" else None)
    assert statuses(results) == {
        "nothing": "finished",
        "abort": "aborted",
        "garbage": "finished",
        "exit": "aborted",
        "raise": "failed",
        "sys_exit": "failed",
        "unavailable": "unavailable",
        "sleep": "timeout",
        "disk_of_its_own": "failed",
    }
    assert ended == [c.id for c in cases]
    by_name = {r.case.id.removeprefix("fake/"): r.candidate for r in results}
    assert "SIGABRT" in by_name["abort"].message
    assert by_name["abort"].last == {"tap": "layers.01.norm.rms.input", "phase": "prefill", "step": 0}
    assert any("do_abort" in line for line in by_name["abort"].output)  # the stack that was printed
    assert "exit code 0" in by_name["exit"].message
    assert "ValueError: the kernel said no" in by_name["raise"].message
    assert by_name["raise"].last["tap"] == "layers.01.norm.rms.input"
    assert "0.7 s" in by_name["sleep"].message
    assert any("do_sleep" in line for line in by_name["sleep"].output)
    assert by_name["nothing"].peak_rss_bytes > 1 << 20
    for result in results:
        assert json.loads((result.directory / "candidate" / "run.json").read_text())["status"]
    assert (case_directory(tmp_path / "out", "fake/nothing", "candidate") / "outputs.json").is_file()


@pytest.mark.parametrize("what", ["allocate", "child_allocates"])
def test_a_candidate_without_end_of_memory_is_ended_by_us(tmp_path, what):
    """Catches a limit that the process, or its child, can outgrow until the machine kills something else."""
    limit = 900 << 20
    results = run(plan(tmp_path, case(what), case("nothing"), memory_limit_bytes=limit))
    assert statuses(results) == {what: "memory", "nothing": "finished"}
    assert "0.879 GiB" in results[0].candidate.message
    assert limit < results[0].candidate.peak_rss_bytes < 2 * limit
    assert "allocate" not in {p.name() for p in psutil.Process().children(recursive=True)}


def test_the_time_that_watching_takes_is_not_the_candidates(tmp_path):
    """Catches a healthy candidate on a slow device that is failed for what judging it costs, and a slow one that is
    given time without end."""
    results = run(plan(tmp_path, case("watched", time_limit_s=1.5), case("slow", time_limit_s=1.5)))
    assert statuses(results) == {"watched": "finished", "slow": "timeout"}
    assert results[0].candidate.seconds > 2.5


def test_a_reference_that_waited_has_its_whole_time(tmp_path):
    """Catches a reference process, started while its case was still running, that is ended for the time it waited."""
    first, second = case("first"), case("second")
    lane = _Lane(plan(tmp_path, first, second, reference=True), "reference", deque())
    lane.process, told = SimpleNamespace(tell=lambda name: told.append(name)), []
    lane.since -= 1e4
    lane.queue.append(first)
    lane.feed()
    assert lane.deadline > time.monotonic()
    lane.since -= 1e4
    lane.queue.append(second)
    lane.feed()
    assert lane.deadline < time.monotonic()  # it is at work: another case gives it no time
    assert told == [first.id, second.id]


def test_a_candidate_that_dies_again_and_again_is_given_up(tmp_path):
    """Catches an endless row of new processes, and remaining cases that are called finished."""
    results = run(plan(tmp_path, *(case("abort") for _ in range(1)), case("exit"), case("nothing"), max_deaths=0))
    assert statuses(results) == {"abort": "aborted", "exit": "unavailable", "nothing": "unavailable"}
    assert "died 1 times" in results[2].candidate.message


@pytest.mark.parametrize(
    ("backend", "status", "words"),
    [
        ("LoadRaises", "failed", "while loading the model: RuntimeError: no such kernel image"),
        ("LoadAborts", "aborted", "while loading the model"),
        ("LoadSleeps", "timeout", "while loading the model: it took more than the limit of 4 s"),
        ("StartAborts", "aborted", "SIGABRT"),
        ("CannotBeMade", "unavailable", "the vendor's library is not installed"),
        ("NoAnswer", "failed", "run() must return Outputs"),
    ],
)
def test_a_candidate_that_cannot_start(tmp_path, backend, status, words):
    """Catches a load that fails and is retried for every case, or ends as an error of ours."""
    results = run(plan(tmp_path, case("nothing"), case("garbage"), backend=backend, load_limit_s=4))
    assert results[0].candidate.status == status
    assert words in results[0].candidate.message
    assert results[1].candidate.status in (status, "unavailable")
    assert len(list((tmp_path / "out" / "logs").iterdir())) == 1


def test_the_unobserved_repeat_is_judged_and_timed(tmp_path):
    """Catches times taken with the judge running, and a second run whose failure or other answer goes unseen."""
    same = run(plan(tmp_path / "a", case("nothing"), backend="Healthy", repeats=1))[0].candidate
    assert same.repeat_equal is True
    timing = case_directory(tmp_path / "a" / "out", "fake/nothing", "candidate") / "timing.jsonl"
    assert json.loads(timing.read_text())["phase"] == "prefill"
    assert (
        run(plan(tmp_path / "b", case("nothing"), backend="SecondRunDiffers", repeats=1))[0].candidate.repeat_equal
        is False
    )
    raised = run(plan(tmp_path / "c", case("nothing"), backend="SecondRunRaises", repeats=1))[0].candidate
    assert raised.status == "failed"
    assert "run again, unobserved: RuntimeError: state of the first run" in raised.message


def test_a_schedule_beyond_the_capabilities_is_not_run(tmp_path):
    """Catches a chunked case that a backend without chunks would run in one piece and pass."""
    result = run(plan(tmp_path, case("nothing", schedule=Schedule(chunk=2))))[0]
    assert result.candidate.status == "unavailable"
    assert "chunk" in result.candidate.message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such operators file"),
        ("", "declares nothing"),
        ("x = = 1", "SyntaxError"),
        ("import day0check\n\n1 / 0", "ops.py:3"),
        (
            "import day0check\n@day0check.operator('norm.rsm')\ndef f(x): return x",
            "did you mean 'norm.rms'?",
        ),
        ("import day0check\n@day0check.layout('kw')\nclass L: pass", "has no layout 'kw'"),
        ("import day0check\n@day0check.operator('norm.rms', covers=('k',))\ndef f(x): return x", "'k'"),
    ],
)
def test_operators_files_that_cannot_be_used(tmp_path, text, words):
    """Catches a bad operators file that is left out in silence, or ends in a traceback."""
    path = tmp_path / "ops.py"
    if text is not None:
        path.write_text(text)
    before = _children()
    with pytest.raises(UsageError) as raised:
        run(plan(tmp_path, case("nothing"), ops=str(path)))
    assert raised.value.exit_code == ExitCode.USAGE
    assert words in str(raised.value)
    assert _children() <= before, "a worker was started"


def _children() -> set[int]:
    """Living processes below this one; other tests of the same process may have left some of Python's own."""
    return {p.pid for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}


def test_operators_file_replaces_in_the_candidate(tmp_path):
    """Catches an operators file that is read but not used."""
    path = tmp_path / "ops.py"
    path.write_text("import day0check\n@day0check.operator.wrap('norm.rms')\ndef f(inner, x): return inner(x) + 1\n")
    runs = {}
    for name, ops in (("plain", None), ("wrapped", str(path))):
        run(plan(tmp_path / name, case("nothing"), ops=ops))
        lines = case_directory(tmp_path / name / "out", "fake/nothing", "candidate") / "digests.jsonl"
        runs[name] = {d["tap"]: d["digest"] for d in map(json.loads, lines.read_text().splitlines())}
    changed = {tap for tap in runs["plain"] if runs["plain"][tap] != runs["wrapped"][tap]}
    assert changed == {"layers.01.norm.rms.input"}


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("acelerated", "did you mean 'accelerated'?"),
        ("absent.py:X", "no such file"),
        (f"{FAKES}:Heathy", "did you mean 'Healthy'?"),
        (f"{FAKES}:NoRun", "no method 'operators'"),
    ],
)
def test_unknown_backends(tmp_path, backend, words):
    """Catches a name that means nothing and ends as a finding about the candidate."""
    with pytest.raises(UsageError) as raised:
        run(RunPlan((case("nothing"),), tmp_path / "out", backend=backend, mode="digest", reference=False))
    assert words in str(raised.value)


def test_nothing_and_old_runs_are_refused(tmp_path):
    """Catches records of two runs in one directory."""
    with pytest.raises(NothingSelected):
        run(plan(tmp_path))
    prepare_out(tmp_path / "out")
    with pytest.raises(UsageError, match="already holds a run"):
        prepare_out(tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        prepare_out(tmp_path / "file")
    first = default_out(tmp_path)
    first.mkdir()
    assert default_out(tmp_path) != first
    assert 0 < default_memory_limit() <= 4 << 30


SCRIPT = """
import signal

# a shell that starts us in the background has Ctrl-C ignored, and a child inherits that
signal.signal(signal.SIGINT, signal.default_int_handler)
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_runner import case, plan
from day0check.errors import Day0Error
from day0check.runner import run
try:
    run(plan(Path({out!r}), case("nothing"), case("sleep", 600)), lambda p: print(p.what, p.case, flush=True))
except Day0Error as error:
    print("told", int(error.exit_code), error, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_keeps_what_was_recorded_and_leaves_no_process(tmp_path, number):
    """Catches orphans after Ctrl-C or a CI system's time limit, and records lost with them."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), out=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if line.strip() == "begin fake/sleep":
                time.sleep(0.3)
                children = psutil.Process(process.pid).children(recursive=True)
                process.send_signal(number)
        assert process.wait(20) == 0
    told = next(line for line in lines if line.startswith("told"))
    assert told.startswith("told 3 ")
    assert "interrupted: 1 of 2 cases" in told
    assert children
    assert not any(child.is_running() for child in children)
    recorded = {
        c: json.loads((case_directory(tmp_path / "out", f"fake/{c}", "candidate") / "run.json").read_text())["status"]
        for c in ("nothing", "sleep")
    }
    assert recorded == {"nothing": "finished", "sleep": "unavailable"}


def test_a_killed_runner_takes_its_workers_along(tmp_path):
    """Catches a worker that goes on, and holds a device, after the runner was killed outright."""
    script = SCRIPT.format(tests=str(Path(__file__).parent), out=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.strip() == "begin fake/sleep":
                children = psutil.Process(process.pid).children(recursive=True)
                process.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert children
    assert not alive


def test_run_works_outside_the_main_thread(tmp_path):
    """Catches signal handlers set where Python refuses them."""
    results = []
    thread = threading.Thread(target=lambda: results.extend(run(plan(tmp_path, case("nothing"), backend="Healthy"))))
    thread.start()
    thread.join(60)
    assert statuses(results) == {"nothing": "finished"}


def test_a_measure_cut_by_a_death_is_left_out(tmp_path):
    """Catches a reader that gives up the measures before a line that the dying process could not finish."""
    path = tmp_path / "measures.jsonl"
    line = {"tap": "a", "operator": "norm.rms", "kind": "compute", "phase": "prefill", "layer": 0, "order": 0}
    whole = json.dumps({**line, "rows": 1, "elements": 1, "passed": True})
    path.write_text(f"{whole}\n{whole[: len(whole) // 2]}")
    notes: list[str] = []
    assert [m.tap for m in read_measures(path, notes)] == ["a"]
    assert notes
