"""Times the steps of a candidate without observing it: the recorder of an unobserved repeat.

Each step gives one line of `timing.jsonl`: {"phase", "step", "rows", "seconds", "waited_seconds", "machine_seconds"}.
`seconds` runs from the end of the step before (so what a scheduler does between steps counts) to the end of this one,
with the device waited for. `waited_seconds` is how long of it this thread was ready to run while the processor was
given to others (Linux tells; 0 elsewhere): other work on the machine, never the candidate's own sleep, copies or
device. `machine_seconds` is a fixed piece of work in plain Python and hashing, done right after the step: it says how
fast this machine was at that moment, whatever torch, driver or compiler do. Both are there so that a busy or a slower
machine is not taken for a slow candidate. Standard library + torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from .final_logits import LOGITS, FinalLogits
from .recorder import Recorder
from .registry import Function
from .rows import RowMap

_BLOCK = bytes(range(256)) * 1024  # 256 KiB, hashed for the memory and vector side of a core


def waited() -> float:
    """Seconds that this thread has been kept from a processor since it began; 0 where the system does not tell."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:  # noqa: PTH123 (a read a step: the plainest is quickest)
            return int(file.read().split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def machine_work() -> float:
    """Seconds that a fixed piece of work takes now (about 1 ms): an interpreter loop and two hashes of 256 KiB."""
    lost, begin = waited(), time.perf_counter()
    total = 0
    for i in range(20000):
        total += i & 7
    hashlib.sha256(_BLOCK).digest()
    hashlib.sha256(_BLOCK).digest()
    return max(time.perf_counter() - begin - (waited() - lost), 1e-9)


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


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process; 0 where it was never used."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"]["unique_graphs"]) if utils is not None else 0


class TimingRecorder(Recorder):
    """A recorder without observers that keeps one sample a step. `samples` are the lines of `timing.jsonl`.

    `final` takes the logits of each step, after the clock has been read.
    """

    def __init__(
        self, device: str = "cpu", work: Callable[[], float] = machine_work, final: Optional[FinalLogits] = None
    ) -> None:
        super().__init__()
        self._final = final
        self._fresh: List[Tuple[RowMap, Any]] = []  # logits of the open step
        self.samples: List[Dict[str, Any]] = []
        self._wait, self._work = wait_for(device), work
        self._wait()
        self._since, self._lost = time.perf_counter(), waited()

    @contextlib.contextmanager
    def step(self, phase: str, rows: RowMap, step: int) -> Iterator[None]:
        with super().step(phase, rows, step):
            yield
            self._wait()
            seconds, lost = time.perf_counter() - self._since, waited() - self._lost
            sample = {"phase": phase, "step": step, "rows": len(rows), "seconds": seconds}
            self.samples.append({**sample, "waited_seconds": lost, "machine_seconds": self._work()})
            for row_map, logits in self._fresh:
                self._final.keep(row_map, logits)
            self._fresh.clear()
            self._since, self._lost = time.perf_counter(), waited()

    def call(
        self,
        place: str,
        operator: str,
        function: Function,
        args: Tuple[Any, ...],
        kwargs: Dict[str, Any],
        site: str = "",
        row_map: Optional[RowMap] = None,
    ) -> Any:
        result = function(*args, **kwargs)
        if operator == LOGITS and not place and self._final is not None:
            self._fresh.append((self.rows if row_map is None else row_map, result))
        return result

    def write(self, path: Path) -> None:
        """`timing.jsonl`, whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        partial.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in self.samples))
        partial.replace(path)
