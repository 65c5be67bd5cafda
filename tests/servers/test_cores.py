"""A server's children compute on one core and the process that answers on the others."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVERS = Path(__file__).resolve().parents[2] / "servers"
# the name of a process may hold brackets and blanks, which stand in its line of /proc, too
PARENT = """
import subprocess, sys, threading
open("/proc/self/comm", "w").write("a) b (c")
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
threading.Thread(target=input, daemon=True).start()
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(SERVERS))
    import cores

    return cores.apart


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """(a process of two threads, the process that it started)."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())
        try:
            yield parent.pid, child
        finally:
            os.kill(child, 9)
            parent.kill()


def cores_of(process: int) -> list[set[int]]:
    return [os.sched_getaffinity(int(t.name)) for t in Path(f"/proc/{process}/task").iterdir()]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processes are bound on Linux alone")
def test_the_engine_is_not_on_the_core_of_the_process_that_answers(apart, family: tuple[int, int]) -> None:
    """Would catch an engine that keeps the answering process from its core, which joins the chunks of whole answers."""
    parent, child = family
    all_cores = os.sched_getaffinity(0)
    bound = apart(parent)
    assert bound == (len(all_cores) > 1)
    if bound:
        assert cores_of(child) == [{min(all_cores)}]
        assert cores_of(parent) == [all_cores - {min(all_cores)}] * 2
    assert not apart(child)  # a process without children has nothing to be kept apart from
