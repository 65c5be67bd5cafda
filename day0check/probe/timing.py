"""Times the steps of a candidate without observing it: the recorder of an unobserved repeat.

Each step gives one line of `timing.jsonl`: {"phase", "step", "rows", "seconds", "machine_seconds"}. `seconds` runs from
the end of the step before (so what a scheduler does between steps counts) to the end of this one, with the device
waited for. `machine_seconds` is a fixed piece of work in plain Python and hashing, done right after the step: it says
how fast this machine was at that moment, whatever torch, driver or compiler do, so that a busy machine is not taken
for a slow candidate. Standard library + torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

from .recorder import Recorder
from .rows import RowMap

_BLOCK = bytes(range(256)) * 1024  # 256 KiB, hashed for the memory and vector side of a core


def machine_work() -> float:
    """Seconds that a fixed piece of work takes now (about 1 ms): an interpreter loop and two hashes of 256 KiB."""
    begin = time.perf_counter()
    total = 0
    for i in range(20000):
        total += i & 7
    hashlib.sha256(_BLOCK).digest()
    hashlib.sha256(_BLOCK).digest()
    return time.perf_counter() - begin


def wait_for(device: str) -> Callable[[], None]:
    """What must be called before a clock is read, so that queued work of `device` is counted."""
    kind = device.split(":")[0]
    if kind == "cpu":
        return lambda: None
    import torch

    module: Any = getattr(torch, kind, None)
    if module is None or not hasattr(module, "synchronize"):
        return lambda: None
    return lambda: module.synchronize(device) if ":" in device else module.synchronize()


class TimingRecorder(Recorder):
    """A recorder without observers that keeps one sample a step. `samples` are the lines of `timing.jsonl`."""

    def __init__(self, device: str = "cpu", work: Callable[[], float] = machine_work) -> None:
        super().__init__()
        self.samples: List[Dict[str, Any]] = []
        self._wait, self._work = wait_for(device), work
        self._wait()
        self._since = time.perf_counter()

    @contextlib.contextmanager
    def step(self, phase: str, rows: RowMap, step: int) -> Iterator[None]:
        with super().step(phase, rows, step):
            yield
            self._wait()
            seconds = time.perf_counter() - self._since
            machine = self._work()
            self.samples.append(
                {"phase": phase, "step": step, "rows": len(rows), "seconds": seconds, "machine_seconds": machine}
            )
            self._since = time.perf_counter()

    def write(self, path: Path) -> None:
        """`timing.jsonl`, whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in self.samples))
        partial.replace(path)
