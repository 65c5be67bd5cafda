"""Guards the case `service/embedded` of a run, end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from day0check.baseline import collect
from day0check.cli.service import servable
from day0check.errors import InputError, UsageError
from day0check.gate import Scene
from day0check.types import RunCase

CASES = (RunCase("service/embedded", ()), RunCase("operators/contracts", ()))


def test_only_our_engine_on_one_device_is_served() -> None:
    """Would catch a run that starts our server and calls the verdict that of another engine."""
    assert servable(CASES, backend="accelerated", one_device=True, selectors=()) == CASES
    for other in ({"backend": "mine.py:Engine", "one_device": True}, {"backend": "accelerated", "one_device": False}):
        assert servable(CASES, **other, selectors=("operators",)) == CASES[1:]
        with pytest.raises(UsageError, match="endpoint"):
            servable(CASES, **other, selectors=("service/embedded",))


def test_a_baseline_leaves_the_service_out(tmp_path: Path) -> None:
    """Would catch a default run that cannot be recorded, since a service has no records of an engine."""
    measured = {"service": {"service/embedded": {}}}
    assert collect(tmp_path, Scene({}, "bf16", ("service/embedded",), measured=measured)) == {}
    with pytest.raises(InputError, match="missing"):
        collect(tmp_path, Scene({}, "bf16", ("service/embedded",)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", ["tiny", "tiny-glm-5"])
def test_a_run_starts_asks_and_stops_the_server(model: str, tmp_path: Path) -> None:
    """Would catch a service that is not ready, a start that is not measured, and two runs that do not agree."""
    verdicts = []
    for name in ("one", "two"):
        out = tmp_path / name
        command = [
            sys.executable,
            "-m",
            "day0check.cli",
            "run",
            "service",
            "--model",
            model,
            "--out",
            str(out),
            "--json",
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stdout[-3000:]
        verdicts.append(json.loads(done.stdout))
        start = verdicts[-1]["measured"]["service"]["service/embedded"]["start"]
        assert start["ready"] > start["listening"] > 0
        assert set(start["steps"]) > {"load weights", "verify weights", "warm up operators"}
        assert (out / "snapshots" / "service__embedded" / "service" / "exchanges.jsonl").is_file()
    same = [{k: v for k, v in verdict.items() if k not in ("measured", "environment")} for verdict in verdicts]
    assert same[0] == same[1]
