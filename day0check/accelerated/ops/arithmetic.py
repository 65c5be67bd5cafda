"""Precision of the fast path: operands as stored, sums in float32, one rounding at the end.

Two devices, two ways to the same promise. A CPU multiplies bfloat16 far slower than float32, so operands are widened
and the result rounded once. Elsewhere the native product of the stored type is used, which accumulates in float32
once `strict_sums` has forbidden the shortcuts.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE_COLUMNS = 128  # columns of a row that share the scale of its FP8 codes
BLOCK_ELEMENTS = 1 << 22  # largest float32 intermediate of a blocked operator: 16 MiB
CACHE_ELEMENTS = 1 << 16  # of a block that passes over its rows several times on a CPU: what the caches hold


def wide(x: Tensor) -> Tensor:
    """`x` in a type that carries sums: float32, or float64 when it is float64 already."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T unrounded: `x` [..., in], `weight` [out, in], result in the wide type of `x`."""
    a = wide(x)
    parts = [a @ part.T for part in wide_parts(weight, a.dtype)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def wide_parts(weight: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """`weight` [n, ...] in the wide type `dtype`, some of its n at a time, each valid until the next is asked for.

    A CPU widens every part into the same memory of its thread, at most BLOCK_ELEMENTS (or one of the n): a decode step
    allocates no copies, and none is kept for a layer.
    """
    in_place = weight.device.type == "cpu" and weight.dtype != dtype and not torch.compiler.is_compiling()
    if not in_place or not weight.numel():
        yield weight.to(dtype)
        return
    for some in row_blocks(weight.shape[0], weight[0].numel()):
        part = weight[some]
        yield _widening.room(part.numel(), dtype).view(part.shape).copy_(part)


class _Widening(threading.local):
    """Memory of one thread for the part of a weight that is being multiplied."""

    def __init__(self) -> None:
        self.rooms: dict[torch.dtype, Tensor] = {}

    def room(self, elements: int, dtype: torch.dtype) -> Tensor:
        held = self.rooms.get(dtype)
        if held is None or held.numel() < elements:
            held = self.rooms[dtype] = torch.empty(elements, dtype=dtype)
        return held[:elements]


_widening = _Widening()


def dequantised(x: Tensor, scale: Tensor) -> Tensor:
    """E4M3 codes [rows, in] times their scale [rows, ceil(in/128)] per 128 columns, float32."""
    columns = x.shape[-1]
    whole = scale.repeat_interleave(SCALE_COLUMNS, -1)
    return x.float() * whole[..., :columns]


def linear(x: Tensor, *, weight: Tensor, bias: Tensor | None = None, x_scale: Tensor | None = None) -> Tensor:
    """x W^T (+ bias), float32 sums, rounded once to the type of `x` [..., in]; `weight` [out, in]. With `x_scale`, `x`
    holds E4M3 codes with a scale per 128 columns and the result has the type of `weight`."""
    if x_scale is not None:
        return linear(dequantised(x, x_scale), weight=weight, bias=bias).to(weight.dtype)
    if x.device.type != "cpu" or (x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)):
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    y = product(x, weight)
    return (y if bias is None else y + wide(bias)).to(x.dtype)


def per_head(x: Tensor, *, weight: Tensor) -> Tensor:
    """x_h W_h for every head: `x` [rows, H, in], `weight` [H, in, out], result [rows, H, out] in the type of `x`."""
    a = (x if x.device.type != "cpu" else wide(x)).transpose(0, 1)
    first, heads = 0, []
    for part in wide_parts(weight, a.dtype):
        heads.append(torch.bmm(a[first : first + len(part)], part))
        first += len(part)
    y = heads[0] if len(heads) == 1 else torch.cat(heads)
    return y.transpose(0, 1).to(x.dtype)


def strict_sums() -> None:
    """Forbids sums below float32 and float32 products in fewer bits, on accelerators, in this process."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_reduced_precision_reduction = False
    torch.set_float32_matmul_precision("highest")


def row_blocks(rows: int, elements_per_row: int, *, limit: int = BLOCK_ELEMENTS) -> list[slice]:
    """Slices of rows whose intermediates stay below `limit` elements (one row at least)."""
    size = max(1, limit // max(1, elements_per_row))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def cached_rows(x: Tensor, elements_per_row: int) -> list[slice]:
    """Slices of the rows of `x` [rows, ...] that stay in a CPU's caches while a block is worked on; large ones on
    other devices, whose caches are not what limits them."""
    limit = CACHE_ELEMENTS if x.device.type == "cpu" else BLOCK_ELEMENTS
    return row_blocks(x.shape[0], elements_per_row, limit=limit)


def by_owner(owner: Tensor, batch: int) -> list[tuple[int, slice | Tensor]]:
    """(request, its rows) for every request that has rows; padding rows (owner -1) belong to none.

    Rows that lie side by side come as a slice, so that taking them copies nothing, others as their numbers.
    """
    numbers = owner.tolist()
    found: list[tuple[int, slice | Tensor]] = []
    for request in range(batch):
        count = numbers.count(request)
        if not count:
            continue
        first = numbers.index(request)
        if numbers[first : first + count].count(request) == count:
            found.append((request, slice(first, first + count)))
        else:
            found.append((request, (owner == request).nonzero().squeeze(1)))
    return found


def split_rows(rows: slice | Tensor, size: int) -> list[slice | Tensor]:
    """Rows of a request, `size` of them at a time."""
    if isinstance(rows, slice):
        return [slice(start, min(start + size, rows.stop)) for start in range(rows.start, rows.stop, size)]
    return list(rows.split(size))
