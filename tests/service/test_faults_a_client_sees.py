"""Known faults of the engine under our server, seen by `day0check endpoint` over HTTP alone: caught, and by which.

The check of each was written down before it was run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from day0check.faults.catalogue import select

COMMAND = (sys.executable, "-m", "day0check.cli")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
WAIT_S = 400
CACHING = ("--prefix-cache", "--page", "16")
SMALL_CHUNKS = (*CACHING, "--chunk", "6")


@dataclass(frozen=True)
class Seen:
    """How a fault is asked for and the check of which a blocker must come, with its pattern where one is known."""

    fault: str
    check: str
    pattern: str = ""
    serve: tuple[str, ...] = ()


TABLE = (
    Seen("S-14", "endpoint.oracle", serve=CACHING),  # a block found by its first four tokens
    Seen("S-35", "endpoint.wire", "repeat", SMALL_CHUNKS),  # a block entered before it is computed
    Seen("S-51", "endpoint.images", "same answer", CACHING),  # pictures told apart by too little
    Seen("S-38", "endpoint.oracle"),  # sigmoid twice on beta, in decode
    Seen("S-29", "endpoint.oracle"),  # the routed scale twice
)


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[str]:
    with (
        (folder / "serve.log").open("w") as log,
        subprocess.Popen(
            [*COMMAND, "serve", "--port", "0", "--profile", "fp32", *options],
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


def asked(url: str, out: Path, model: str) -> dict:
    command = [*COMMAND, "endpoint", "--url", url, "--out", str(out), "--json", "--profile", "fp32"]
    command += ["--reference", model, "--part", "wire"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT, timeout=WAIT_S)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seen", TABLE, ids=lambda seen: seen.fault)
def test_a_fault_of_the_engine_is_seen_over_http(seen: Seen, tmp_path: Path) -> None:
    """Would catch a client that cannot tell a wrong cache, a wrong image or wrong numbers from a healthy server."""
    (located,) = select([seen.fault])
    model = located.entry.model
    with serving(tmp_path, "--model", model, "--ops", located.ops, *seen.serve) as url:
        verdict = asked(url, tmp_path / "run", model)
    blockers = [f for f in verdict["findings"] if f["severity"] == "blocker"]
    patterns = {f["evidence"]["pattern"] for f in blockers if f["check"] == seen.check}
    assert patterns, blockers
    assert not seen.pattern or seen.pattern in patterns
    assert verdict["first_fault"]["check"] in {f["check"] for f in blockers}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [(), CACHING, SMALL_CHUNKS], ids=["plain", "prefix cache", "small chunks"])
def test_without_a_fault_nothing_is_seen(options: tuple[str, ...], tmp_path: Path) -> None:
    """Would catch a table above that is right because everything is blamed."""
    with serving(tmp_path, "--model", "tiny", *options) as url:
        verdict = asked(url, tmp_path / "run", "tiny")
    assert [f["message"] for f in verdict["findings"]] == []
    assert verdict["status"] == "ready"
