"""Rotary positions with a temporal, a height and a width axis, from where the images of a sequence lie."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rope_positions(ids: Tensor, *, media_pad: int, row_break: int) -> Tensor:
    """Positions int64 [rows, 3] of the tokens `ids` [rows] of one request from its first on.

    A run of pads and breaks is an image that stands at one text position; inside it height and width count its rows
    and columns, a break being the last column of its row. It takes up as many text positions as it has rows or
    columns, whichever are more.
    """
    index = torch.arange(ids.numel(), device=ids.device)
    breaks = ids == row_break
    image = breaks | (ids == media_pad)
    begins = image & ~F.pad(image, (1, -1))
    ends = image & ~F.pad(image, (-1, 1))
    first_of_image = torch.where(begins, index, 0).cummax(0).values
    first_of_row = torch.where(begins | (image & F.pad(breaks, (1, -1))), index, 0).cummax(0).values
    broken = breaks.cumsum(0) - breaks.long()
    row = torch.where(image, broken - broken[first_of_image], 0)
    column = torch.where(image, index - first_of_row, 0)
    number = begins.cumsum(0)
    extent = torch.zeros(ids.numel() + 1, dtype=torch.int64, device=ids.device)
    extent = extent.scatter_reduce(0, number, torch.where(image, torch.maximum(row, column) + 1, 0), "amax")
    taken = torch.where(image, torch.where(ends, extent[number], 0), 1)
    base = taken.cumsum(0) - taken
    return torch.stack((base, base + row, base + column), 1)
