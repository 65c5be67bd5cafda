"""Throughput of the comparison of two stored tensors, beside other ways to compare the same pair.

    python -m bench.compare [--megabytes 64] [--msprobe PYTHON]

Every figure is beside the read bandwidth measured in turns with it on the same bytes by the same one thread: a compiled
sum of words where numba is installed (the extra `fast`), else a sum by torch. "from files": both read from safetensors,
a slice of rows at a time, by what is installed. Peak memory: what is taken beyond the pair. `--msprobe`: an interpreter
that has mindstudio-probe, which then compares the same pairs from its own dumps (`bench/peer_msprobe.py`).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.clocks import paired
from bench.peer_msprobe import Refused, compared_by_msprobe
from day0check.compare.pair_statistics import compiled, pair_statistics
from day0check.compare.stored_pairs import stored_pairs
from day0check.probe.memory import Allocations

WANTED = {"compiled": 0.80, "torch alone": 0.25}
FORMATS_WANTED = ("bfloat16", "float32", "float8_e4m3fn")
CPU = torch.device("cpu")
COLUMNS = 4096
Pair = tuple[torch.Tensor, torch.Tensor]


def values(dtype: torch.dtype, megabytes: int) -> tuple[torch.Tensor, torch.Generator]:
    """What a dump [rows, 4096] of so many bytes in a stored type holds."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(max(1, (megabytes << 20) // dtype.itemsize // COLUMNS), COLUMNS, generator=generator), generator


def rounded_again(dtype: torch.dtype, megabytes: int) -> Pair:
    """Two dumps of one tensor, one of them with a factor of about 2^-9 on every row: in bfloat16 half of the elements
    have other bits, in float32 all, in E4M3 one of sixty."""
    truth, generator = values(dtype, megabytes)
    return (truth * (1 + 2.0**-9 * torch.randn(truth.shape[0], 1, generator=generator))).to(dtype), truth.to(dtype)


def quantised_twice(megabytes: int) -> Pair:
    """The codes that two legal quantisers give one tensor of bfloat16 values: x times the reciprocal of the row's
    scale, and x / scale. One code of four thousand differs."""
    truth = values(torch.float8_e4m3fn, megabytes)[0].bfloat16().float()
    scale = truth.abs().amax(1, keepdim=True) / 448
    return tuple(q.to(torch.float8_e4m3fn) for q in (truth * (1 / scale), truth / scale))


def unlike(megabytes: int) -> Pair:
    """Codes of which hardly any two are the same."""
    truth, generator = values(torch.float8_e4m3fn, megabytes)
    return truth.to(torch.float8_e4m3fn), torch.randn(truth.shape, generator=generator).to(torch.float8_e4m3fn)


PAIRS: dict[str, Callable[[int], Pair]] = {
    "bfloat16": lambda m: rounded_again(torch.bfloat16, m),
    "float32": lambda m: rounded_again(torch.float32, m),
    "float8_e4m3fn": quantised_twice,
    "float8, rounded again": lambda m: rounded_again(torch.float8_e4m3fn, m),
    "float8, all unlike": unlike,
}


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
    """What reads both and does nothing else."""
    loops = compiled()
    flat = [t.view(torch.uint8).reshape(-1).view(torch.float32) for t in (a, b)]
    if loops is None:
        return lambda: [t.sum() for t in flat]
    words = [t.numpy().view("int64") for t in flat]
    return lambda: [loops.read(w) for w in words]


def from_files(a: torch.Tensor, b: torch.Tensor, folder: Path) -> Callable[[], object]:
    """What reads both from safetensors, a slice at a time, and compares them; files that the system has in memory."""
    for side, tensor in (("own", a), ("oracle", b)):
        save_file({"pair": tensor}, folder / side)
    return lambda: list(stored_pairs(folder / "own", folder / "oracle"))


def measured(name: str, a: torch.Tensor, b: torch.Tensor, repeats: int) -> dict[str, float]:
    """Prints the lines of one pair; the share of the read bandwidth that each way reached."""
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Callable[[], object]] = {"reading": reading(a, b)}
        ways["torch alone"] = lambda: pair_statistics(a, b, fast=False)
        if compiled() is not None:
            ways["compiled"] = lambda: pair_statistics(a, b, fast=True)
        ways["from files"] = from_files(a, b, Path(folder))
        ways["assert_close"] = lambda: assert_close(a, b)
        best = paired(ways, device=CPU, repeats={w: 2 if w == "assert_close" else repeats for w in ways})
        peaks = {way: peak_bytes(run) for way, run in ways.items() if way != "reading"}
    both = 2 * a.numel() * a.dtype.itemsize
    peaks["from files"] = max(0, peaks["from files"] - both)  # both files are mapped, which is the system's memory
    for way, seconds in best.items():
        wanted = f"{WANTED[way]:.0%}" if way in WANTED else ""
        peak = f"{peaks[way] / 2**20:.1f}" if way in peaks else ""
        share = f"{best['reading'] / seconds:.0%}"
        print(f"{name:22} {way:12} {both / seconds / 1e9:7.2f} {share:>8} {wanted:>7} {peak:>8}", flush=True)
    return {way: best["reading"] / seconds for way, seconds in best.items()}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Throughput of the comparison of two stored tensors.")
    parser.add_argument("--megabytes", type=int, default=64, help="size of each of the two")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--msprobe", type=Path, help="a Python that has mindstudio-probe")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    print(f"{'pair':22} {'by':12} {'GB/s':>7} {'of read':>8} {'wanted':>7} {'peak MB':>8}")
    reached: dict[tuple[str, str], float] = {}
    for name, made in PAIRS.items():
        a, b = made(given.megabytes)
        reached |= {(name, way): share for way, share in measured(name, a, b, given.repeats).items()}
        _peer(name, a, b, given.msprobe)
    return 0 if _judged(reached) else 1


def _peer(name: str, a: torch.Tensor, b: torch.Tensor, python: Path | None) -> None:
    try:
        found = compared_by_msprobe(a, b, python)
    except Refused as error:
        print(f"{name:22} {'msprobe':12} {error}", flush=True)
        return
    speed = 2 * a.numel() * a.dtype.itemsize / found.seconds / 1e9
    print(f"{name:22} {'msprobe':12} {speed:7.2f} {'':8} {'':7} {found.peak_bytes / 2**20:8.1f}", flush=True)


def _judged(reached: Mapping[tuple[str, str], float]) -> bool:
    """Whether each format reaches what is wanted; prints what does not. Codes that are unlike are shown beside it."""
    met = True
    for (name, way), share in reached.items():
        if way in WANTED and name in FORMATS_WANTED and share < WANTED[way]:
            print(f"NOT MET: {name}, {way}: {share:.0%} of the read bandwidth, wanted {WANTED[way]:.0%}")
            met = False
    if compiled() is None:
        print("compiled: not measured, numba is not installed (pip install 'day0check[fast]')")
    return met and compiled() is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
