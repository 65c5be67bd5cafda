"""Throughput of the comparison of two stored tensors, beside `torch.testing.assert_close` on the same pair.

    python -m bench.compare [--megabytes 64]

Every figure is beside the read bandwidth measured in turns with it on the same bytes: a compiled sum of words where
numba is installed (the extra `fast`), else a matrix times a vector. Peak memory: what is taken beyond the pair.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tracemalloc
from collections.abc import Callable

import torch

from bench.clocks import paired
from day0check.compare.pair_statistics import FORMATS, compiled, pair_statistics
from day0check.probe.memory import Allocations

WANTED = {"compiled": 0.80, "torch alone": 0.25}
CPU = torch.device("cpu")


def pair(dtype: torch.dtype, megabytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two dumps [rows, 4096] of one tensor in a stored type, one of them rounded a second time."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(max(1, (megabytes << 20) // dtype.itemsize // 4096), 4096, generator=generator)
    return (truth * (1 + 2.0**-9 * torch.randn(truth.shape[0], 1, generator=generator))).to(dtype), truth.to(dtype)


def assert_close(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dtype == torch.float8_e4m3fn:  # it knows no tolerance for this type
        a, b = a.float(), b.float()
    with contextlib.suppress(AssertionError):
        torch.testing.assert_close(a, b)


def peak_bytes(run: Callable[[], object]) -> int:
    """Bytes of tensors and of Python objects that a call holds at most beyond what was there."""
    with Allocations() as seen:
        run()
    tracemalloc.start()
    run()
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return seen.peak_bytes + python


def reading(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    """What reads both and does nothing else: a compiled sum of words, or a product with a vector."""
    loops = compiled()
    if loops is not None:
        words = [t.view(torch.uint8).reshape(-1).numpy().view("int64") for t in (a, b)]
        return lambda: [loops.read(w) for w in words]
    matrices = [t.view(torch.uint8).reshape(-1).view(torch.float32).reshape(-1, 1024) for t in (a, b)]
    vector = torch.zeros(1024)
    return lambda: [torch.mv(m, vector) for m in matrices]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Throughput of the comparison of two stored tensors.")
    parser.add_argument("--megabytes", type=int, default=64, help="size of each of the two")
    megabytes = parser.parse_args(arguments).megabytes
    torch.set_num_threads(1)
    print(f"{'dtype':14} {'by':12} {'GB/s':>7} {'of read':>8} {'wanted':>7} {'peak MB':>8}")
    met = True
    for dtype in FORMATS:
        a, b = pair(dtype, megabytes)
        ways = {"reading": reading(a, b), "torch alone": lambda a=a, b=b: pair_statistics(a, b, fast=False)}
        if compiled() is not None:
            ways["compiled"] = lambda a=a, b=b: pair_statistics(a, b, fast=True)
        ways["assert_close"] = lambda a=a, b=b: assert_close(a, b)
        best = paired(ways, device=CPU, repeats=5)
        roof = 2 * a.numel() * dtype.itemsize / best["reading"]
        for way, seconds in best.items():
            speed = 2 * a.numel() * dtype.itemsize / seconds
            wanted = WANTED.get(way)
            met = met and (wanted is None or speed >= wanted * roof)
            told = f"{'' if wanted is None else f'{wanted:.0%}':>7} {peak_bytes(ways[way]) / 2**20:8.1f}"
            print(f"{str(dtype).removeprefix('torch.'):14} {way:12} {speed / 1e9:7.2f} {speed / roof:8.0%} {told}")
    if compiled() is None:
        print("compiled: not measured, numba is not installed (pip install 'day0check[fast]')")
    return 0 if met and compiled() is not None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
