"""All statistics of a pair of stored tensors in one pass over both, block by block: bounded memory, any float format.

With numba (the extra `fast`) one compiled loop of one thread reads each element once; without it torch does the same on
all of its threads (E4M3 on a CPU: numpy on one), on blocks that stay in the cache. Legend: R rows, C channels
(everything behind the first axis). The oracle is `b`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType

import torch

from day0check.compare import pair_statistics_codes, pair_statistics_torch

FORMATS = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)  # what the compiled loop reads


@dataclass(frozen=True)
class PairStatistics:
    """Of a - b: `error` sum of squares, `largest` magnitude; `signal` sum of squares of b,
    `product` sum of (a - b) b; `row_error` and `row_signal` float64 [R]. Elements where either is no finite number are
    in none of these: `odd` counts those of them whose bits are not the same."""

    elements: int
    error: float
    signal: float
    product: float
    largest: float
    odd: int
    row_error: torch.Tensor
    row_signal: torch.Tensor

    @property
    def relative_l2(self) -> float:
        return (self.error / self.signal) ** 0.5 if self.signal > 0 else float(self.error > 0)

    @property
    def slope(self) -> float:
        """The factor by which a is larger than b, less one."""
        return self.product / self.signal if self.signal > 0 else 0.0


def compiled() -> ModuleType | None:
    """The compiled loops, None where numba is not installed."""
    return _compiled()


@cache
def _compiled() -> ModuleType | None:
    try:
        from day0check.compare import pair_statistics_fast
    except ImportError:
        return None
    return pair_statistics_fast


def pair_statistics(a: torch.Tensor, b: torch.Tensor, *, fast: bool | None = None) -> PairStatistics:
    """The statistics of a [R, ...] beside b of the same shape, both of any (different) float dtypes.

    `fast`: the compiled loop, by default where it is installed and reads the dtypes of tensors on a CPU. Raises
    ValueError for shapes that differ or a compiled loop that cannot be had.
    """
    if a.shape != b.shape:
        raise ValueError(f"a pair of shapes {list(a.shape)} and {list(b.shape)} has no statistics")
    rows = a.shape[0] if a.dim() else 1
    a, b = (t.detach().reshape(rows, t.numel() // max(1, rows)).contiguous() for t in (a, b))
    stored = a.dtype == b.dtype and a.dtype in FORMATS and a.device.type == b.device.type == "cpu"
    loops = compiled() if fast is not False and stored else None
    if loops is None and fast:
        raise ValueError(f"no compiled loop reads {a.dtype} and {b.dtype} on {a.device.type}; is numba installed?")
    codes = stored and a.dtype == torch.float8_e4m3fn
    by = loops or (pair_statistics_codes if codes else pair_statistics_torch)
    (error, signal, product, largest, odd), row_error, row_signal = by.statistics(a, b)
    return PairStatistics(a.numel(), error, signal, product, largest, int(odd), row_error, row_signal)


def joined(parts: Iterable[PairStatistics]) -> PairStatistics:
    """Of consecutive rows of the same pair, read one after another (from safetensors, a slice at a time)."""
    parts = list(parts)
    names = ("elements", "error", "signal", "product", "odd")
    return replace(
        parts[0],
        **{name: sum(getattr(p, name) for p in parts) for name in names},
        largest=max(p.largest for p in parts),
        row_error=torch.cat([p.row_error for p in parts]),
        row_signal=torch.cat([p.row_signal for p in parts]),
    )
