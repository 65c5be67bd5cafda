"""Random rounding under which equal rows stay equal: a healthy operator rounds equal rows alike, so that a mean over
them (attention to the same token again and again) does not average their errors away."""

from __future__ import annotations

import torch

from day0check.compare.rounding import WEIGHTS, Rounder, round_blocks


class EqualRowsAlike(Rounder):
    """A `Rounder` that draws once for rows (first axis) of equal content; scores and weights are drawn by value."""

    def __call__(self, point: str, value: torch.Tensor) -> torch.Tensor:
        if self.points.get(point) is None or point in WEIGHTS or value.dim() < 2:
            return super().__call__(point, value)
        first, at = distinct_rows(value)
        if first is None:
            return super().__call__(point, value)
        return super().__call__(point, value[first])[at]


def quantised_alike(x: torch.Tensor, block: str, generator: torch.Generator) -> torch.Tensor:
    """x [rows, ...] as a random quantisation in the block format `block` decodes, the same one for equal rows."""
    first, at = distinct_rows(x)
    if first is None:
        return round_blocks(x, block, "random", generator)
    return round_blocks(x[first], block, "random", generator)[at]


def distinct_rows(x: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(number of the first row of each content, which of these each row equals); (None, every row) where all rows
    differ. Rows are told apart by a position-weighted 64-bit sum of their bits."""
    rows = torch.arange(len(x), device=x.device)
    if len(x) < 2 or x.dtype not in (torch.float64, torch.float32):
        return None, rows
    bits = x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32).flatten(1).long()
    weights = torch.arange(1, bits.shape[1] + 1, device=x.device) * -7046029254386353131 | 1
    digests = (bits * weights + (bits >> 32) * (weights >> 17)).sum(1)
    contents, at = torch.unique(digests, return_inverse=True)
    if len(contents) == len(x):
        return None, rows
    first = torch.full_like(contents, len(x)).scatter_reduce_(0, at, rows, "amin")
    return first, at


def rows_as_one(x: torch.Tensor) -> float:
    """How many rows of x [rows, ...] count as one where equal rows err alike: 1 where all differ, rows where none does.

    Rows over their effective number, (sum n)^2 / sum n^2 over contents that n rows share. Equal queries see other keys,
    but a fused kernel rounds the weights of the same keys alike for all of them.
    """
    _, at = distinct_rows(x)
    return float(torch.bincount(at).square().sum()) / max(1, len(x))
