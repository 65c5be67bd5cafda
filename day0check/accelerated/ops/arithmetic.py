"""Precision of the fast path: operands as stored, sums in float32, one rounding at the end.

Two devices, two ways to the same promise. A CPU multiplies bfloat16 far slower than float32, so operands are widened
and the result rounded once. Elsewhere the native product of the stored type is used, which accumulates in float32
once `strict_sums` has forbidden the shortcuts.
"""

from __future__ import annotations

import weakref

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE_COLUMNS = 128  # columns of a row that share the scale of its FP8 codes
BLOCK_ELEMENTS = 1 << 22  # largest float32 intermediate of a blocked operator: 16 MiB
COPIED_BYTES = 64 << 20  # of a CPU's float32 copies of weights that are kept
CACHE_ELEMENTS = 1 << 16  # of a block that passes over its rows several times on a CPU: what the caches hold


def wide(x: Tensor) -> Tensor:
    """`x` in a type that carries sums: float32, or float64 when it is float64 already."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T unrounded: `x` [..., in], `weight` [out, in], result in the wide type of `x`."""
    a = wide(x)
    return a @ widened(weight, a.dtype).T


_copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}


def widened(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`weight` in the wide type `dtype`. What a CPU has to copy for that is kept as long as the weight lives, up to
    COPIED_BYTES for all weights together: a decode step would make the same copies again and again."""
    if weight.dtype == dtype:
        return weight
    known = _copies.get(id(weight))
    if known is not None and known[0]() is weight and known[1] == weight._version and known[2].dtype == dtype:
        return known[2]
    copy = weight.to(dtype)
    if weight.device.type == "cpu" and _room_for(copy):
        key = id(weight)
        _copies[key] = (weakref.ref(weight, lambda _: _copies.pop(key, None)), weight._version, copy)
    return copy


def _room_for(copy: Tensor) -> bool:
    return copied_bytes() + copy.numel() * copy.element_size() <= COPIED_BYTES


def copied_bytes() -> int:
    """Bytes of the wide copies that are kept now."""
    return sum(copy.numel() * copy.element_size() for _, _, copy in list(_copies.values()))


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
    if x.device.type != "cpu" or x.dtype in (torch.float32, torch.float64):
        return F.linear(x, widened(weight, x.dtype), None if bias is None else bias.to(x.dtype))
    y = product(x, weight)
    return (y if bias is None else y + wide(bias)).to(x.dtype)


def per_head(x: Tensor, *, weight: Tensor) -> Tensor:
    """x_h W_h for every head: `x` [rows, H, in], `weight` [H, in, out], result [rows, H, out] in the type of `x`."""
    a, w = (x, weight.to(x.dtype)) if x.device.type != "cpu" else (wide(x), widened(weight, wide(x).dtype))
    return torch.bmm(a.transpose(0, 1), w).transpose(0, 1).to(x.dtype)


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
