"""The main job on the embedded default: ready, in its time and memory, and the same twice."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import case_file, command

GIB = 2**30


def test_smoke_is_ready_within_a_minute(tmp_path: Path) -> None:
    """Would catch a false alarm on the shipped model, a check of the stage that did not run, and a slow start."""
    start = time.perf_counter()
    ended = command("run", "--stage", "smoke", cwd=tmp_path)
    seconds = time.perf_counter() - start
    assert ended.code == 0, ended.stderr
    assert ended.verdict["status"] == "ready"
    assert ended.verdict["not_run"] == []
    assert sorted(ended.verdict["cases"]) == ["image/one_photo", "operators/contracts", "text/one_turn"]
    assert {outcome["status"] for outcome in ended.verdict["checks"]} == {"passed"}
    assert seconds <= 60 * _slowness(), f"{seconds:.0f} s"


def test_two_runs_say_the_same(tmp_path: Path) -> None:
    """Would catch a seed, a time, an order of threads or a path that finds its way into the verdict."""
    verdicts = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        ended = command("run", case_file("short"), cwd=folder)
        assert ended.code == 0, ended.stderr
        verdicts.append({k: v for k, v in ended.verdict.items() if k not in ("measured", "environment")})
    assert verdicts[0] == verdicts[1]


@pytest.mark.slow
def test_the_default_run_is_ready_in_its_time_and_memory(tmp_path: Path) -> None:
    """Would catch cases that outgrow 90 seconds or 4 GiB, and any false alarm of the whole stage t0."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "day0check.cli", "run", "--out", str(tmp_path / "out")],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    peak = 0
    while process.poll() is None:
        peak = max(peak, _resident_bytes(process.pid))
        time.sleep(0.1)
    seconds = time.perf_counter() - start
    _, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert seconds <= 90 * _slowness(), f"{seconds:.0f} s"
    assert peak <= 4 * GIB, f"{peak / GIB:.2f} GiB"


def _resident_bytes(pid: int) -> int:
    """Resident bytes of a process and its descendants, those that end meanwhile left out."""
    total = 0
    try:
        parent = psutil.Process(pid)
        family: list[Any] = [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    for process in family:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def _slowness() -> float:
    """How many processes want each processor just now, at least 1: the limits hold for a machine of our own."""
    return max(1.0, os.getloadavg()[0] / 2)
