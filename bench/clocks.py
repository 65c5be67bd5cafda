"""Clocks and roofs of a measurement on a machine that others use too.

A figure is the minimum over interleaved repeats of the processor time of this thread: time that other processes took
is in none of it, and what disturbs a repeat (caches, turbo) only ever adds. On a device it is the wall clock with the
device waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch

Timed = Callable[[], object]


def clock(device: torch.device) -> float:
    """Seconds of processor time of this thread on a CPU, of the wall clock with the device waited for elsewhere."""
    if device.type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def seconds_of(timed: Timed, device: torch.device) -> float:
    begin = clock(device)
    timed()
    return clock(device) - begin


def paired(timed: Mapping[str, Timed], *, device: torch.device, repeats: Mapping[str, int] | int) -> dict[str, float]:
    """Least seconds of each, all of them once warmed up and then run in turns."""
    counts = {name: repeats if isinstance(repeats, int) else repeats[name] for name in timed}
    for run in timed.values():
        run()
    best = dict.fromkeys(timed, float("inf"))
    for turn in range(max(counts.values())):
        for name, run in timed.items():
            if turn < counts[name]:
                best[name] = min(best[name], seconds_of(run, device))
    return best


def gemm_roof(device: torch.device, *, rows: int = 2048, size: int = 1024, repeats: int = 5) -> float:
    """Operations a second of a float32 product [rows, size] x [size, size]."""
    a, b = torch.ones(rows, size, device=device), torch.ones(size, size, device=device)
    out = torch.empty(rows, size, device=device)
    best = paired({"gemm": lambda: torch.mm(a, b, out=out)}, device=device, repeats=repeats)
    return 2.0 * rows * size * size / best["gemm"]


def read_roof(device: torch.device, *, bytes_: int = 64 << 20, repeats: int = 5) -> float:
    """Bytes a second of a float32 matrix times a vector, which reads the matrix once."""
    columns = 1024
    a = torch.ones(bytes_ // 4 // columns, columns, device=device)
    x, out = torch.ones(columns, device=device), torch.empty(a.shape[0], device=device)
    best = paired({"gemv": lambda: torch.mv(a, x, out=out)}, device=device, repeats=repeats)
    return a.numel() * 4 / best["gemv"]
