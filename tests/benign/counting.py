"""What every sweep for false alarms needs: a bound on the rate, a state file to go on from, processes side by side."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

CONFIDENCE = 0.95


def upper_bound(runs: int, alarms: int) -> float:
    """The rate of alarms that is not exceeded at 95%, from `alarms` in `runs`: one-sided, Clopper and Pearson (1934),
    about 3 / runs without an alarm. 1 where nothing was run."""
    from scipy.special import betaincinv

    return float(betaincinv(alarms + 1, runs - alarms, CONFIDENCE)) if runs > alarms else 1.0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The finished lines of a state file; one that was cut off is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def done_by(
    work: Callable[[Any], dict[str, Any]],
    tasks: Iterable[Any],
    state: Path,
    *,
    jobs: int = 1,
    until: float = float("inf"),
) -> Iterator[dict[str, Any]]:
    """Each result of `work`, written to `state` as a line before it is yielded; none begins after the time `until`
    (monotonic seconds). With one job in this process and in order, with more in processes, as they end."""
    state.parent.mkdir(parents=True, exist_ok=True)
    with state.open("a", encoding="utf-8") as file:
        for result in _in_order(work, tasks, until) if jobs == 1 else _side_by_side(work, tasks, jobs, until):
            file.write(json.dumps(result) + "\n")
            file.flush()
            yield result


def _in_order(work: Callable[[Any], Any], tasks: Iterable[Any], until: float) -> Iterator[Any]:
    for task in tasks:
        if time.monotonic() > until:
            return
        yield work(task)


def _side_by_side(work: Callable[[Any], Any], tasks: Iterable[Any], jobs: int, until: float) -> Iterator[Any]:
    def open_tasks() -> Iterator[Any]:
        for task in tasks:
            slots.acquire()  # no further ahead than the processes, so that a time limit is one
            if time.monotonic() > until:
                return
            yield task

    context = multiprocessing.get_context("spawn")
    slots = context.BoundedSemaphore(2 * jobs)
    with context.Pool(jobs, initializer=_one_thread) as pool:
        for result in pool.imap_unordered(work, open_tasks()):
            slots.release()
            yield result


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
