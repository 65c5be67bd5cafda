"""Rows of caches as records: E4M3 codes, a float32 scale per 128 of them, and a rest in bfloat16, as bytes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.formats import FP8_BLOCK, e4m3_decode, e4m3_encode, fp8_columns_decode
from reference.rounding import Round, exact


def record(x: Tensor, *, round: Round = exact) -> Tensor:
    """A row as a cache gives it back. A profile may say that it quantises what goes in."""
    return round("out", x)


def as_claimed(x: Tensor, *, scale: Tensor) -> Tensor:
    """A row on its way into a cache of codes: itself, since codes are no part of the model."""
    return x


def as_read(codes: Tensor, *, scale: Tensor, round: Round = exact) -> Tensor:
    """A row on its way back: as it went in."""
    return round("out", codes)


def quantise(x: Tensor, *, scale: Tensor) -> Tensor:
    """Codes float8_e4m3fn of x [rows, width] at the given scale float32 [1]: nearest, beyond 448 scales saturated."""
    return e4m3_encode(x.double() / scale.double())


def dequantise(codes: Tensor, *, scale: Tensor, round: Round = exact) -> Tensor:
    """Values [..., width] of codes float8_e4m3fn at the given scale [1], in float64."""
    return round("out", e4m3_decode(codes, torch.float64) * scale.double())


def pack(codes: Tensor, *, scale: Tensor, rest: Tensor) -> Tensor:
    """uint8 [rows, c + 4 ceil(c/128) + 2 r] of codes float8_e4m3fn [rows, c], scale float32 [rows, ceil(c/128)] and
    rest bfloat16 [rows, r], in this order, little-endian."""
    rows = codes.shape[0]
    parts = (codes.view(torch.uint8), scale.contiguous().view(torch.uint8), rest.contiguous().view(torch.uint8))
    return torch.cat([part.reshape(rows, -1) for part in parts], dim=1)


def unpack(record: Tensor, *, width: int, round: Round = exact) -> Tensor:
    """Values [..., width + r] of records uint8 [..., bytes] with `width` codes, in float64."""
    scales = math.ceil(width / FP8_BLOCK)
    codes, scale, rest = record.split([width, 4 * scales, record.shape[-1] - width - 4 * scales], dim=-1)
    scale, rest = _values(scale, torch.float32), _values(rest, torch.bfloat16)
    values = fp8_columns_decode(codes.contiguous().view(torch.float8_e4m3fn), scale, dtype=torch.float64)
    return round("out", torch.cat([values, rest.double()], dim=-1))


def _values(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [..., n] as values, copied first: a view needs them at an address that the type divides."""
    values = torch.empty(*raw.shape[:-1], raw.shape[-1] // dtype.itemsize, dtype=dtype, device=raw.device)
    values.view(torch.uint8).copy_(raw)
    return values
