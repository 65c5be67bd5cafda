"""Errors that follow the blocks in which weights are scaled: one scale of a block is not that of its codes.

A weight [N, K] of codes has a scale for each block of it: 32 neighbours of a row (MXFP4, INT4 groups), 128 of a row, or
128 x 128 (FP8). In a linear a wrong one is an error of its own kind: in the columns of the block's rows, and there a
multiple of what the block's part of the input gives, not of the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from day0check.compare.judgement import Judgement
from day0check.compare.replay import Replay
from day0check.compare.rounding import FORMATS, dtype_name, ulp

BLOCKS = ((1, 32), (1, 128), (128, 128), (0, 32), (0, 128))  # rows (0: all) and columns of a weight that share a scale
EXPLAINS = 0.8  # of the square of all errors that one block must explain
FAR = 64.0  # times the square of the noise of one element: of many blocks one looks like noise
MORE = 1.25  # times what a factor on each column of the result explains
LARGEST = 2**24  # products of a block's part that are looked at
PATTERN = "scale block"


@dataclass(frozen=True)
class WrongBlock:
    """A block of rows [first_row, first_row + rows) and columns of a weight that is off by `factor`."""

    first_row: int
    rows: int
    first_column: int
    columns: int
    factor: float
    explained: float

    def text(self) -> str:
        rows = (
            f"row {self.first_row}" if self.rows == 1 else f"rows {self.first_row} to {self.first_row + self.rows - 1}"
        )
        last = self.first_column + self.columns - 1
        return (
            f"explained by one scale block of the weight, {rows} x columns {self.first_column} to {last}: its part is "
            f"{self.factor:.4g} times what it should be"
        )


def told_by_block(judgement: Judgement, replay: Replay, result: torch.Tensor, oracle: torch.Tensor) -> Judgement:
    """A judgement of a linear that failed, with the block that explains its errors where one does."""
    x, weight = replay.arguments.get("x"), replay.arguments.get("weight")
    plain = isinstance(x, torch.Tensor) and isinstance(weight, torch.Tensor) and x.is_floating_point()
    if not judgement.failing or not plain or x.dim() != 2 or weight.dim() != 2 or result.shape != oracle.shape:
        return judgement
    dtype = dtype_name(result.dtype)
    noise = ulp(oracle.contiguous(), dtype).square() / 12 if dtype in FORMATS else torch.zeros_like(oracle)
    found = wrong_block(x.double(), weight.double(), result.double() - oracle, oracle, noise=float(noise.sum()))
    if found is None:
        return judgement
    return replace(judgement, pattern=PATTERN, message=f"{judgement.message}; {found.text()}")


def wrong_block(
    x: torch.Tensor, weight: torch.Tensor, error: torch.Tensor, oracle: torch.Tensor, *, noise: float = 0.0
) -> WrongBlock | None:
    """The block of `weight` [N, K] whose share of x [R, K] explains `error` [R, N] best, all float64; None where none
    explains enough of what is not `noise` (the sum of its squares), or factors on columns of `oracle` [R, N] do."""
    usable = torch.isfinite(error) & torch.isfinite(oracle)
    if not bool(usable.all()) or x.numel() * weight.shape[0] > LARGEST or not bool(error.any()):
        return None
    by_column = (error * oracle).sum(0).square() / oracle.square().sum(0).clamp(min=1e-300)
    best = None
    for rows, columns in BLOCKS:
        if columns < x.shape[1]:  # the only block along the input is a factor on columns
            best = _better(best, _best_of(x, weight, error, rows or len(weight), columns))
    if best is None or best.explained < EXPLAINS * (float(error.square().sum()) - noise):
        return None
    own = float(by_column[best.first_row : best.first_row + best.rows].sum())
    return best if best.explained > max(FAR * noise / error.numel(), MORE * own) else None


def _better(one: WrongBlock | None, other: WrongBlock) -> WrongBlock:
    """That which explains more; of two that explain as much, the smaller."""
    return other if one is None or other.explained > 1.01 * one.explained else one


def _best_of(x: torch.Tensor, weight: torch.Tensor, error: torch.Tensor, rows: int, columns: int) -> WrongBlock:
    found = []
    for first in range(0, x.shape[1], columns):
        part = x[:, first : first + columns] @ weight[:, first : first + columns].T
        along, size = (torch.nn.functional.pad((error * part).sum(0), (0, -len(weight) % rows)), part.square().sum(0))
        size = torch.nn.functional.pad(size, (0, -len(weight) % rows))
        along, size = along.unflatten(0, (-1, rows)).sum(1), size.unflatten(0, (-1, rows)).sum(1).clamp(min=1e-300)
        at = int((along.square() / size).argmax())
        found.append(
            WrongBlock(
                at * rows,
                min(rows, len(weight) - at * rows),
                first,
                min(columns, x.shape[1] - first),
                1 + float(along[at] / size[at]),
                float(along[at].square() / size[at]),
            )
        )
    return max(found, key=lambda block: block.explained)


def off_by_blocks(own: torch.Tensor, expected: torch.Tensor, block: int) -> tuple[int, float] | None:
    """(number of blocks of `block` neighbours that differ, their largest factor) where every value of such a block is
    `own` = one factor times `expected`, the factors differ among all blocks, and others are right; None elsewhere."""
    pad = -expected.shape[-1] % block
    own, expected = (torch.nn.functional.pad(x, (0, pad)).unflatten(-1, (-1, block)) for x in (own, expected))
    factor = (own * expected).sum(-1) / expected.square().sum(-1).clamp(min=1e-300)
    scaled = (own - factor.unsqueeze(-1) * expected).abs() <= 2.0**-20 * expected.abs()
    wrong = (own != expected).any(-1)
    factors = factor[expected.any(-1)]
    if not bool(scaled.all()) or not bool(wrong.any()) or not len(factors) or bool((factors == factors[0]).all()):
        return None
    off = factor[wrong]
    return int(wrong.sum()), float(off[off.log().abs().argmax()]) if bool((off > 0).all()) else float(off[0])
