"""Digests of results by content of rows: the same for any batch, chunk or page order, different for swapped values."""

from __future__ import annotations

import hashlib

import torch

from day0check.probe.rows import PADDING, RowMap

_MASK = (1 << 64) - 1
_COLUMN, _POSITION = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # odd, from the golden ratio and from xxHash64


def row_weights(rows: RowMap) -> torch.Tensor:
    """int64 [rows] odd weights of (request, position); zero for padding rows."""
    names = [int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little") for name in rows.requests]
    weights = [
        0 if owner == PADDING else _mixed(names[owner] + (position + 1) * _POSITION)
        for owner, position in zip(rows.owner, rows.position, strict=True)
    ]
    return torch.tensor([_signed(w) for w in weights], dtype=torch.int64)


def plain_weights(count: int, call: int) -> torch.Tensor:
    """Weights for rows without an address: by place within the call and by the call's number in the case."""
    return torch.tensor([_signed(_mixed(call * _COLUMN + i + 1)) for i in range(count)], dtype=torch.int64)


def weighted_sum(result: torch.Tensor, weights: torch.Tensor, *, unordered: bool = False) -> int:
    """Sum modulo 2^64 of lanes times column weight times row weight: result [rows, ...], weights int64 [rows].

    `unordered`: the values of a row are sorted first (selections).
    """
    if result.numel() == 0:
        return 0
    flat = result.detach().reshape(result.shape[0] if result.dim() else 1, -1)
    if unordered:
        flat = flat.sort(-1).values
    lanes = _lanes(flat.contiguous())
    at = torch.arange(1, lanes.shape[1] + 1, dtype=torch.int64, device=lanes.device)
    columns = at * _signed(_COLUMN) | 1
    return int((lanes.mul_(columns).sum(1) * weights.to(lanes.device)).sum()) & _MASK


def hexadecimal(total: int) -> str:
    return f"{total & _MASK:016x}"


def _lanes(x: torch.Tensor) -> torch.Tensor:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if x.dtype == torch.bool:
        return x.to(torch.int64)
    lanes = x.view(kinds[x.element_size()]).to(torch.int64)
    return lanes ^ (lanes >> 32) if x.element_size() == 8 else lanes


def _mixed(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 31)) * _COLUMN) & _MASK
    return (value ^ (value >> 29)) | 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
