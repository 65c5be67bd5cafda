"""Digests of tensors: position-weighted sums over 32-bit lanes, the same on every device.

Torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

import torch

_MULTIPLIERS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # odd, from the golden ratio and from xxHash64
_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def lanes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor in row-major order as int64 values of 32 bits each, the last one filled with zeros."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.numel() % 4:
        data = torch.nn.functional.pad(data, (0, 4 - data.numel() % 4))
    if data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def digest_lanes(tensor: torch.Tensor) -> torch.Tensor:
    """Two int64 sums modulo 2^64 on the tensor's own device; nothing waits for the device.

    sum_i lane_i * w_i with odd weights w_i that depend on the position, so that exchanged lanes show; integer sums
    have one value in any order of addition.
    """
    values = lanes(tensor)
    at = torch.arange(1, values.numel() + 1, dtype=torch.int64, device=values.device)
    sums = []
    for multiplier in _MULTIPLIERS:
        weight = at * _signed(multiplier)
        weight = (weight ^ (weight >> 29)) * _signed(multiplier) | 1
        sums.append((values * weight).sum())
    return torch.stack(sums)


def row_digests(tensor: torch.Tensor) -> torch.Tensor:
    """int64 [rows]: the first of the two sums for the bytes of each row of `tensor` by itself, on its own device."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if tensor.numel() == 0:
        return torch.zeros(rows, dtype=torch.int64, device=tensor.device)
    data = tensor.detach().contiguous().reshape(rows, -1).view(torch.uint8)
    if data.shape[1] % 4:
        data = torch.nn.functional.pad(data, (0, 4 - data.shape[1] % 4))
    if data.storage_offset() % 4:
        data = data.clone()
    values = data.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    weight = torch.arange(1, values.shape[1] + 1, dtype=torch.int64, device=values.device) * _signed(_MULTIPLIERS[0])
    weight = (weight ^ (weight >> 29)) * _signed(_MULTIPLIERS[0]) | 1
    return (values * weight).sum(1)


def hexadecimal(sums: torch.Tensor) -> str:
    """The 32 digits of the two sums (waits for the device)."""
    return "".join(f"{int(value) & _MASK:016x}" for value in sums.tolist())


def digest(tensor: torch.Tensor) -> str:
    """32 hexadecimal digits for the bytes of a tensor. Shape and dtype are not part of it."""
    return hexadecimal(digest_lanes(tensor))
