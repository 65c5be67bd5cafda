"""Records of the caches of the fast path: E4M3 codes, their float32 scales and a bfloat16 rest as bytes of one row."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128  # codes that share a scale
SCALE_BYTES = 4


def pack(codes: Tensor, *, scale: Tensor, rest: Tensor) -> Tensor:
    """uint8 [rows, bytes] of `codes` [rows, c] in E4M3, `scale` float32 [rows, c/128] and `rest` bfloat16 [rows, r]."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in (codes, scale, rest)], -1)


def unpack(record: Tensor, *, width: int) -> Tensor:
    """bfloat16 [..., width + rest]: each of the `width` codes times its scale, rounded once, then the rest."""
    behind = width + SCALE_BYTES * -(-width // BLOCK)
    whole = torch.contiguous_format
    codes = record[..., :width].contiguous().view(torch.float8_e4m3fn).to(torch.float32)
    scale = record[..., width:behind].clone(memory_format=whole).view(torch.float32)  # a copy begins at a whole address
    rest = record[..., behind:].clone(memory_format=whole).view(torch.bfloat16)
    values = codes * scale.repeat_interleave(BLOCK, -1)[..., :width]
    return torch.cat((values.to(torch.bfloat16), rest), -1)


def as_kept(x: Tensor) -> Tensor:
    """A row on its way into a cache that keeps it as it is."""
    return x
