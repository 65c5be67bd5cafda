"""Records of the caches of the fast path: E4M3 codes, their float32 scales and a bfloat16 rest as bytes of one row."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # codes that share a scale
SCALE_BYTES = 4
LARGEST = 448.0


def pack(codes: Tensor, *, scale: Tensor, rest: Tensor) -> Tensor:
    """uint8 [rows, bytes] of `codes` [rows, c] in E4M3, `scale` float32 [rows, c/128] and `rest` bfloat16 [rows, r]."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in (codes, scale, rest)], -1)


def unpack(record: Tensor, *, width: int) -> Tensor:
    """bfloat16 [..., width + rest]: each of the `width` codes times its scale, rounded once, then the rest."""
    behind = width + SCALE_BYTES * -(-width // BLOCK)
    codes = record[..., :width].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    scale, rest = _as(torch.float32, record[..., width:behind]), _as(torch.bfloat16, record[..., behind:])
    values = codes * scale.repeat_interleave(BLOCK, -1)[..., :width]
    return torch.cat((values.to(torch.bfloat16), rest), -1)


def _as(dtype: torch.dtype, raw: Tensor) -> Tensor:
    """The values of `raw` bytes, in memory of their own: bytes of a row may lie at any address."""
    values = raw.new_empty(*raw.shape[:-1], raw.shape[-1] // dtype.itemsize, dtype=dtype)
    values.view(torch.uint8).copy_(raw)
    return values


def quantise(x: Tensor, *, scale: Tensor) -> Tensor:
    """Plain E4M3 codes of `x` [rows, width] at the calibrated `scale` [1]."""
    return (x.to(torch.float32) / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def dequantise(codes: Tensor, *, scale: Tensor) -> Tensor:
    """bfloat16 values of plain E4M3 `codes` [..., width] at the calibrated `scale` [1]."""
    return (codes.to(torch.float32) * scale).to(torch.bfloat16)


def as_kept(x: Tensor) -> Tensor:
    """A row on its way into a cache that keeps it as it is."""
    return x
