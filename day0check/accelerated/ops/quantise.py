"""Activations in FP8 on the fast path: E4M3 codes and a float32 scale for 128 columns of a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from day0check.accelerated.ops.arithmetic import SCALE_COLUMNS

LARGEST = 448.0  # of E4M3


def rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`x` [rows, in] as codes float8_e4m3fn [rows, in] and scales float32 [rows, ceil(in/128)].

    A scale puts its block's largest magnitude at 448; it is 1 where the block is all zero.
    """
    width = x.shape[-1]
    blocks = F.pad(x.float(), (0, -width % SCALE_COLUMNS)).unflatten(-1, (-1, SCALE_COLUMNS))
    low, high = torch.aminmax(blocks, dim=-1)
    largest = torch.maximum(-low, high)
    scale = torch.where(largest == 0, torch.ones_like(largest), largest / LARGEST)
    codes = torch.clamp(blocks / scale.unsqueeze(-1), -LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.flatten(-2)[..., :width].contiguous(), scale
