"""All statistics of a pair of stored tensors in one pass over both, block by block: bounded memory, any float format.

With numba (the extra `fast`) one compiled loop reads each element once; without it torch does the same on blocks that
stay in the cache. Legend: R rows, C channels (everything behind the first axis). The oracle is `b`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType

import torch

BLOCK_ELEMENTS = 2**16  # of one operand in float32: 256 KiB, which stays in the second cache
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
    a, b = a.detach().reshape(rows, -1).contiguous(), b.detach().reshape(rows, -1).contiguous()
    readable = a.dtype == b.dtype and a.dtype in FORMATS and a.device.type == b.device.type == "cpu"
    loops = compiled() if fast is not False and readable else None
    if loops is None:
        if fast:
            raise ValueError(f"no compiled loop reads {a.dtype} and {b.dtype} on {a.device.type}; is numba installed?")
        return _by_torch(a, b)
    totals, row_error, row_signal = loops.statistics(a, b)
    error, signal, product, largest, odd = totals
    return PairStatistics(a.numel(), error, signal, product, largest, int(odd), row_error, row_signal)


def joined(parts: Iterable[PairStatistics]) -> PairStatistics:
    """Of consecutive rows of the same pair, read one after another (from safetensors, a slice at a time)."""
    first, *rest = parts
    for part in rest:
        first = replace(
            first,
            elements=first.elements + part.elements,
            error=first.error + part.error,
            signal=first.signal + part.signal,
            product=first.product + part.product,
            largest=max(first.largest, part.largest),
            odd=first.odd + part.odd,
            row_error=torch.cat([first.row_error, part.row_error]),
            row_signal=torch.cat([first.row_signal, part.row_signal]),
        )
    return first


def _by_torch(a: torch.Tensor, b: torch.Tensor) -> PairStatistics:
    rows, width = a.shape
    step, columns = max(1, BLOCK_ELEMENTS // max(1, width)), min(width, BLOCK_ELEMENTS)
    x, o, e = (torch.empty(min(step, rows) * columns, dtype=torch.float32, device=a.device) for _ in range(3))
    row_error = torch.zeros(rows, dtype=torch.float64, device=a.device)
    row_signal = torch.zeros_like(row_error)
    product, largest, odd = 0.0, 0.0, 0
    for first in range(0, rows, step):
        for left in range(0, width, columns):
            at = slice(first, first + step), slice(left, left + columns)
            shape = a[at].shape
            n = shape.numel()
            blocks = (x[:n].view(shape), o[:n].view(shape), e[:n].view(shape))
            part = _block(_widened(a[at], blocks[0]), _widened(b[at], blocks[1]), blocks[2])
            row_error[at[0]] += part[0].double().square_()
            row_signal[at[0]] += part[1].double().square_()
            product, largest = product + part[2], max(largest, part[3])
            odd += part[4]
    error, signal = float(row_error.sum()), float(row_signal.sum())
    return PairStatistics(a.numel(), error, signal, product, largest, odd, row_error.cpu(), row_signal.cpu())


def _block(x: torch.Tensor, o: torch.Tensor, e: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float, float, int]:
    """(root of row errors, root of row signals, product, largest, odd) of a float32 block; e is overwritten."""
    torch.sub(x, o, out=e)
    row_error, row_signal = torch.linalg.vector_norm(e, dim=1), torch.linalg.vector_norm(o, dim=1)
    odd = 0
    if not bool(torch.isfinite(row_error).all()):  # rare: the values themselves are looked at
        finite = torch.isfinite(x) & torch.isfinite(o)
        odd = int((~finite & (x.view(torch.int32) != o.view(torch.int32))).sum())
        x.masked_fill_(~finite, 0.0)
        o.masked_fill_(~finite, 0.0)
        torch.sub(x, o, out=e)
        row_error, row_signal = torch.linalg.vector_norm(e, dim=1), torch.linalg.vector_norm(o, dim=1)
    product = float(torch.dot(e.flatten(), o.flatten()))
    low, high = torch.aminmax(e) if e.numel() else (e.new_zeros(()), e.new_zeros(()))
    return row_error, row_signal, product, max(-float(low), float(high)), odd


def _widened(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """The values of x, float32, in `into`. Those of E4M3 by moving bits: torch's own conversion takes ten times as long
    on a CPU."""
    if x.dtype != torch.float8_e4m3fn or x.device.type != "cpu":
        return into.copy_(x)
    codes = x.view(torch.int8)
    into.view(torch.int32).copy_(codes).bitwise_left_shift_(20).bitwise_and_(-0x78100000)
    into.mul_(2.0**120)
    if x.numel() and max(-float(into.min()), float(into.max())) > 448:  # where the code of NaN ends
        into.masked_fill_(into.abs() > 448, torch.nan)
    return into
