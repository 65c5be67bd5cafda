"""Baselines with the real engine: unchanged is ready, slower by 30 % or with another tie rule is not. Takes minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CASE = """
id = "timed"
time_limit_s = 300

[[request]]
id = "a"
max_new_tokens = 40
turns = [{ user = "Which of the two tides of a day is the higher one, and why?" }]
"""
SLOW = """
import contextlib
import time

from day0check.backends.accelerated import Accelerated


class Slow(Accelerated):
    def run(self, requests, schedule, recorder):
        step = recorder.step

        @contextlib.contextmanager
        def slower(*arguments):
            with step(*arguments):
                begin = time.perf_counter()
                yield
                until = time.perf_counter() + 0.3 * (time.perf_counter() - begin)
                while time.perf_counter() < until:
                    pass

        recorder.step = slower
        return super().run(requests, schedule, recorder)
"""
OTHER_TIES = """
import day0check


@day0check.operator.wrap("dsa.select")
def select(inner, scores, *, visible, **keywords):
    \"\"\"Ties to the higher index: the columns are mirrored, so that of equal scores the last one comes first.\"\"\"
    import torch

    width = scores.shape[1]
    columns = torch.arange(width, device=scores.device)
    mirrored = scores.flip(1).masked_fill(columns >= width, float("-inf"))
    hidden = columns.flip(0)[None, :] >= visible[:, None]
    found = inner(mirrored.masked_fill(hidden, float("-inf")), visible=torch.full_like(visible, width), **keywords)
    chosen = torch.where(found >= 0, width - 1 - found, found)
    return torch.where(chosen < visible[:, None], chosen, torch.full_like(chosen, -1)).to(found.dtype)
"""


def day0check(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "day0check.cli", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, env=environment)


def verdict(folder: Path) -> dict:
    return json.loads((folder / "verdict.json").read_text())


@pytest.mark.timeout(1800)
def test_speed(tmp_path: Path) -> None:
    """Would catch a speed gate that fires on the same code, or sleeps through 30 %."""
    (tmp_path / "timed.toml").write_text(CASE)
    (tmp_path / "slow.py").write_text(SLOW)
    for i in range(3):
        done = day0check("run", "timed.toml", "--out", f"first{i}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = day0check("baseline", "record", "a", "first0", "first1", "first2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for i in range(3):
        done = day0check("run", "timed.toml", "--baseline", "a", "--out", f"same{i}", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    done = day0check("run", "timed.toml", "--baseline", "a", "--backend", "slow.py:Slow", "--out", "slow", cwd=tmp_path)
    assert done.returncode == 1, verdict(tmp_path / "slow")["measured"]["baseline"]["speed"]
    assert {f["check"] for f in verdict(tmp_path / "slow")["findings"]} == {"baseline.speed"}


@pytest.mark.timeout(900)
def test_another_tie_rule(tmp_path: Path) -> None:
    """Would catch a baseline that does not see which of equal scores was chosen."""
    (tmp_path / "ties.py").write_text(OTHER_TIES)
    assert day0check("run", "operators", "--out", "first", cwd=tmp_path).returncode == 0
    assert day0check("baseline", "record", "a", "first", cwd=tmp_path).returncode == 0
    same = day0check("run", "operators", "--baseline", "a", "--out", "same", cwd=tmp_path)
    assert same.returncode == 0, same.stderr
    done = day0check("run", "operators", "--baseline", "a", "--ops", "ties.py", "--out", "ties", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    found = [f for f in verdict(tmp_path / "ties")["findings"] if f["check"] == "baseline.choices"]
    assert [f["operator"] for f in found] == ["dsa.select"]
