"""Digests of weights by value: whoever keeps a weight in another dtype, order in memory or device has the same digest.

The values are compared as float32, which every stored low-precision weight becomes without loss; bytes stay bytes.
"""

from __future__ import annotations

import hashlib

import torch

from day0check.probe.digest import digest_lanes, hexadecimal

PIECE = 1 << 20  # elements digested at a time: the digest widens them
PART_BYTES = 1 << 22
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # odd, from the golden ratio, as a signed number
_MASK = (1 << 64) - 1


def value_digest(weight: torch.Tensor) -> str:
    """32 hexadecimal digits of the values of `weight` in row-major order; neither shape nor dtype is part of it.

    Floating-point values count as float32, integers as their bytes.
    """
    flat = weight.detach().reshape(-1)
    whole = hashlib.sha256()
    for begin in range(0, flat.numel(), PIECE):
        piece = flat[begin : begin + PIECE]
        whole.update(hexadecimal(digest_lanes(piece.float() if piece.is_floating_point() else piece)).encode())
    return whole.hexdigest()[:32]


def part_digests(stack: torch.Tensor) -> tuple[str, ...]:
    """16 hexadecimal digits for the bytes of each of the parts [parts, ...] of a stack: a change of any byte of a part
    always changes its digest (the sum of its 32-bit lanes, each times an odd number, modulo 2^64)."""
    data = stack.detach().contiguous().reshape(stack.shape[0], -1).view(torch.uint8)
    if data.shape[1] % 4:
        data = torch.nn.functional.pad(data, (0, 4 - data.shape[1] % 4))
    at = torch.arange(1, data.shape[1] // 4 + 1, dtype=torch.int64, device=data.device) * _MULTIPLIER
    odd = (at ^ (at >> 29)) * _MULTIPLIER | 1
    sums: list[int] = []
    step = max(1, PART_BYTES // max(1, data.shape[1]))
    for begin in range(0, data.shape[0], step):
        piece = data[begin : begin + step]
        piece = piece.clone() if piece.storage_offset() % 4 else piece
        sums += ((piece.view(torch.int32).to(torch.int64) & 0xFFFFFFFF) * odd).sum(1).tolist()
    return tuple(f"{value & _MASK:016x}" for value in sums)
