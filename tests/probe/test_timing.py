"""Step times: what counts as a step's, what as the machine's, and a file that is whole or not there."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from day0check.probe.rows import RowMap
from day0check.probe.timing import TimingRecorder, machine_work, waited


def rows(count: int) -> RowMap:
    return RowMap(("a",), (0,) * count, tuple(range(count)))


def test_time_between_steps_counts_and_the_work_for_the_machine_does_not(tmp_path: Path) -> None:
    """Would catch a slow scheduler that is left out, and our own measuring that is counted as the candidate's."""

    def work() -> float:
        time.sleep(0.2)
        return 0.002

    recorder = TimingRecorder(work=work)
    with recorder.step("prefill", rows(3), 0):
        pass
    time.sleep(0.05)
    with recorder.step("decode", rows(1), 1):
        time.sleep(0.02)
    first, second = recorder.samples
    assert [(s["phase"], s["step"], s["rows"], s["machine_seconds"]) for s in (first, second)] == [
        ("prefill", 0, 3, 0.002),
        ("decode", 1, 1, 0.002),
    ]
    assert 0.07 <= second["seconds"] - second["waited_seconds"] < 0.17
    recorder.write(tmp_path / "timing.jsonl")
    assert [json.loads(line) for line in (tmp_path / "timing.jsonl").read_text().splitlines()] == recorder.samples
    assert [p.name for p in tmp_path.iterdir()] == ["timing.jsonl"]


def test_a_step_that_raises_leaves_no_sample() -> None:
    """Would catch half a step among the samples."""
    recorder = TimingRecorder(work=lambda: 0.001)
    with pytest.raises(ZeroDivisionError), recorder.step("decode", rows(1), 0):
        raise ZeroDivisionError
    assert recorder.samples == []


def test_sleep_is_not_waiting_for_the_processor() -> None:
    """Would catch a candidate that sleeps and is excused for it."""
    before = waited()
    time.sleep(0.1)
    assert waited() - before < 0.08


def test_calls_are_made_without_an_observer() -> None:
    """Would catch a timing run that judges or copies anything."""
    recorder = TimingRecorder(work=lambda: 0.001)
    with recorder.step("decode", rows(1), 0):
        assert recorder.call("", "x.y", lambda a, *, b: a + b, (1,), {"b": 2}) == 3
    assert recorder.order == 0


def test_the_machine_has_a_speed() -> None:
    """Would catch a figure of zero, which everything would be divided by."""
    assert 0 < min(machine_work() for _ in range(5)) < 0.05
