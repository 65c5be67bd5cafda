"""`day0check endpoint` on our own server with a cache that is too small: preempted, by its own counters, and right."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

COMMAND = (sys.executable, "-m", "day0check.cli")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
FP32 = ("--profile", "fp32")  # where rounding hides nothing
SMALL = ("--max-batch", "16", "--pages", "60", "--max-model-len", "2048", "--prefix-cache", *FP32)
WAIT_S = 300


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    with (
        (folder / "serve.log").open("w") as log,
        subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", *SMALL, *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=ENVIRONMENT,
        ) as server,
    ):
        try:
            yield re.search(r"http://\S+", server.stdout.readline())[0]
        finally:
            server.terminate()


def asked(url: str, out: Path) -> dict:
    command = [*COMMAND, "endpoint", "--url", url, "--part", "interference", "--out", str(out), "--json", *FP32]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=WAIT_S)
    return json.loads(done.stdout)


def preemptions(url: str) -> float:
    with urllib.request.urlopen(url + "/metrics", timeout=20) as response:
        return float(re.search(r"^vllm:num_preemptions_total\{.*\} (\S+)$", response.read().decode(), re.M)[1])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_preemption_is_forced_and_changes_nothing(tmp_path: Path) -> None:
    """Would catch preemption that is never reached, that nobody proves, or that changes an answer of our server."""
    with serving(tmp_path) as url:
        verdict = asked(url, tmp_path / "run")
        counted = preemptions(url)
    assert verdict["status"] == "ready", verdict["findings"]
    paths = {row["path"]: row for row in verdict["measured"]["endpoint"]["exercised"]}
    assert counted > 0
    assert all(row["exercised"] for row in paths.values()), paths
    assert f"{counted:.0f} preemptions" in paths["preemption"]["proof"]
