"""The statistics of a pair of tensors by torch operators, block by block, on all of torch's threads; where that is one
thread of a CPU, numpy's BLAS adds up the squares of the oracle.

Every operator writes into room that was made before, and blocks are large: operators begin and end together on all
threads, which takes as long as a few thousand elements. Blocks whose float32 squares tell nothing (no finite number, no
error, tiny or huge ones) are found by their largest square at the end and done again in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

BLOCK_ELEMENTS = 2**19  # for each thread, of one operand in float32: 2 MiB, which the last cache holds
BLAS_WIDTHS = range(128, 2**14 + 1)  # for shorter rows its calls take too long, over longer ones its sums lose digits
LEAST, INFINITE = 0x0D800000, 0x7F800000  # bits of 2^-100, below which squares lose some of theirs, and of infinity

Sums = tuple[float, float, float, float, int]


@dataclass(frozen=True)
class Cut:
    """How [R, C] is cut: blocks of `step` whole rows, or of `columns` of one row (the last of a row may be shorter)."""

    rows: int
    width: int
    step: int
    columns: int

    @classmethod
    def of(cls, rows: int, width: int, *, elements: int) -> Cut:
        return cls(rows, width, max(1, min(rows, elements // width)), min(width, elements))

    def shapes(self) -> list[tuple[int, int]]:
        """[rows, columns] of every block, in the order of memory."""
        if self.columns < self.width:
            full, rest = divmod(self.width, self.columns)
            return ([(1, self.columns)] * full + [(1, rest)] * (rest > 0)) * self.rows
        full, rest = divmod(self.rows, self.step)
        return [(self.step, self.width)] * full + [(rest, self.width)] * (rest > 0)

    def of_rows(self, cells: torch.Tensor) -> torch.Tensor:
        """[R] of what belongs to the rows of all blocks, one after another."""
        return cells.view(self.rows, -1).sum(1)


class _Blocks:
    """The blocks of a pair and what is found of each: squares of its rows, product, bits of the largest square."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, cut: Cut) -> None:
        self.shapes = cut.shapes()
        sizes, rows = [r * c for r, c in self.shapes], [r for r, _ in self.shapes]
        self.own, self.oracle = a.view(-1).split(sizes), b.view(-1).split(sizes)
        device = a.device
        self.cells = torch.zeros((2, sum(rows)), dtype=torch.float32, device=device)
        self.products = torch.zeros(len(sizes), dtype=torch.float32, device=device)
        self.largest = torch.zeros(len(sizes), dtype=torch.int32, device=device)
        self.into = (*(c.split(rows) for c in self.cells), self.products.unbind(), self.largest.unbind())
        self.room = torch.empty((2, max(sizes)), dtype=torch.float32, device=device)

    def run(self) -> None:
        """Fills the cells of every block from its values."""
        shape = None
        for at, (x, o, error, signal, product, largest) in enumerate(
            zip(self.own, self.oracle, *self.into, strict=True)
        ):
            if self.shapes[at] != shape:
                shape = self.shapes[at]
                e, wide = self.room[:, : shape[0] * shape[1]]
                rows, bits, wide_rows = e.view(shape), e.view(torch.int32), wide.view(shape)
            x = x if x.dtype == torch.float32 else e.copy_(x)
            o, oracle_rows = (o, o.view(shape)) if o.dtype == torch.float32 else (wide.copy_(o), wide_rows)
            torch.sub(x, o, out=e)
            torch.dot(e, o, out=product)
            torch.mul(e, e, out=e)
            torch.sum(rows, 1, out=error)
            torch.amax(bits, 0, out=largest)
            _squares(oracle_rows, wide_rows, signal)


def _squares(rows: torch.Tensor, room: torch.Tensor, into: torch.Tensor) -> None:
    """The sum of squares of every row of float32 [n, C], digits kept however long a row is; writes over `room` of that
    shape, which may be `rows`. BLAS takes half of torch's time (it writes no squares), but here has one thread."""
    if rows.device.type == "cpu" and torch.get_num_threads() == 1 and rows.shape[1] in BLAS_WIDTHS:
        values = rows.numpy()
        np.matmul(values[:, None, :], values[:, :, None], out=into.numpy()[:, None, None])
    else:
        torch.mul(rows, rows, out=room)
        torch.sum(room, 1, out=into)


def statistics(a: torch.Tensor, b: torch.Tensor) -> tuple[Sums, torch.Tensor, torch.Tensor]:
    """((error, signal, product, largest, odd), row errors, row signals) of two contiguous tensors [R, C].

    The largest error is the root of the largest square, which is that very number where a square has all its bits.
    """
    rows, width = a.shape
    if not a.numel():
        nothing = torch.zeros(rows, dtype=torch.float64)
        return (0.0, 0.0, 0.0, 0.0, 0), nothing, nothing.clone()
    cut = Cut.of(rows, width, elements=BLOCK_ELEMENTS * torch.get_num_threads())
    blocks = _Blocks(a, b, cut)
    blocks.run()
    error, signal = blocks.cells.double()
    products, roots = blocks.products.double(), blocks.largest.view(torch.float32).double().sqrt_().float().double()
    odd = 0
    errors, signals = error.split([r for r, _ in blocks.shapes]), signal.split([r for r, _ in blocks.shapes])
    for at in _doubtful(blocks, (errors, signals)):
        found = careful(blocks.own[at].view(blocks.shapes[at]), blocks.oracle[at].view(blocks.shapes[at]))
        errors[at].copy_(found[0])
        signals[at].copy_(found[1])
        products[at], roots[at], odd = found[2], found[3], odd + found[4]
    row_error, row_signal = cut.of_rows(error).cpu(), cut.of_rows(signal).cpu()
    sums = float(row_error.sum()), float(row_signal.sum()), float(products.sum()), float(roots.max()), odd
    return sums, row_error, row_signal


def _doubtful(blocks: _Blocks, found: tuple[tuple[torch.Tensor, ...], ...]) -> list[int]:
    """Numbers of the blocks that float32 squares do not tell everything of; a block without any error is none."""
    doubtful = []
    overflowed = not math.isfinite(float(blocks.cells.sum()))
    for at, bits in enumerate(blocks.largest.tolist()):
        known = LEAST <= bits < INFINITE or (bits == 0 and _same_bytes(blocks.own[at], blocks.oracle[at]))
        finite = not overflowed or all(bool(torch.isfinite(squares[at]).all()) for squares in found)
        if not known or not finite:
            doubtful.append(at)
    return doubtful


def _same_bytes(x: torch.Tensor, o: torch.Tensor) -> bool:
    return x.dtype == o.dtype and torch.equal(x.view(torch.uint8), o.view(torch.uint8))


def careful(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float, float, int]:
    """(row errors, row signals, product, largest, odd) in float64, without what is no finite number."""
    x, o = a.float(), b.float()
    finite = torch.isfinite(x) & torch.isfinite(o)
    odd = int((~finite & (x.view(torch.int32) != o.view(torch.int32))).sum())
    o = torch.where(finite, o, 0.0)
    e = (torch.where(finite, x, 0.0) - o).double()
    o = o.double()
    return e.square().sum(1), o.square().sum(1), float((e * o).sum()), float(e.abs().max()), odd
