"""The statistics of a pair of E4M3 tensors on a CPU by torch and numpy, from their codes, on one thread.

Torch turns these codes into numbers one at a time, so nothing is converted that need not be: words of eight codes that
are the same on both sides have no error, and where few differ only their codes are looked up. All others go by way of
float16, where a code means what it means over `SCALE`, and exactly, once its seven low bits are moved to exponent and
mantissa. Codes at even and at odd places lie in different bytes of a word of sixteen bits and are moved apart. Torch
turns float16 into float32; for all else numpy has the faster loops. What is found of a block is only written down; it
is added up for all blocks at once, which saves as much as a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from day0check.compare.pair_statistics_torch import Cut, Sums, careful

BLOCK_CODES = 2**19
SCALE = 2.0**8
WORDS_KEPT = 2**16  # words that differ, of 24 bytes each with what is kept of them, before they are looked up
DENSE_SHARE = 1 / 16  # from so many words that differ on, it is quicker to widen all
WORD = 8
_MAGNITUDES, _NAN = np.int64(0x7F7F7F7F7F7F7F7F), 0x7F
_SEVEN, _SIGN_AND_SEVEN, _WITHOUT_SECOND = 0x3F80, -0x4080, -0x4001  # of sixteen bits: where those of a code end up
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


class _Room:
    """What blocks of this shape are worked on in, made once: words of both sides where their last is not whole,
    magnitudes of codes, which words differ, and of each side float16 codes and float32 values.

    Values of a block lie as [parts, rows, columns / parts], first the even places of all rows and then the odd ones.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        rows, columns = shape
        self.parts = 1 if columns % 2 else 2
        codes = rows * columns
        self.own, self.oracle, self.bits = np.zeros((3, -(-codes // WORD)), dtype=np.int64)
        self.bytes = self.bits.view(np.uint8)
        self.differ = np.empty(len(self.bits), dtype=np.bool_)
        halves = torch.empty((2, codes), dtype=torch.int16)
        self.halves, self.halves16 = halves.view(2, self.parts, -1).numpy(), halves.view(torch.float16)
        self.floats = torch.empty((2, codes), dtype=torch.float32)
        self.wide = self.floats.view(2, self.parts, rows, columns // self.parts).numpy()


@dataclass
class _Seen:
    """What was found of the blocks: `cells` float32 [error, signal, product; parts; rows of blocks] over `SCALE`
    squared; words that differ and are not looked up yet, with the place of the first code of each; what was done again
    in float64."""

    cells: np.ndarray
    row_error: torch.Tensor  # float64, of the words that were looked up
    words: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    again: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # by first row of blocks
    product: float = 0.0
    largest: float = 0.0
    odd: int = 0


def statistics(a: torch.Tensor, b: torch.Tensor) -> tuple[Sums, torch.Tensor, torch.Tensor]:
    """((error, signal, product, largest, odd), row errors, row signals) of two contiguous E4M3 tensors [R, C]."""
    rows, width = a.shape
    if not a.numel():
        nothing = torch.zeros(rows, dtype=torch.float64)
        return (0.0, 0.0, 0.0, 0.0, 0), nothing, nothing.clone()
    cut = Cut.of(rows, width, elements=BLOCK_CODES)
    shapes = cut.shapes()
    rooms = {shape: _Room(shape) for shape in set(shapes)}
    cells = np.zeros((3, 2, sum(count for count, _ in shapes)), dtype=np.float32)
    seen = _Seen(cells, torch.zeros(rows, dtype=torch.float64))
    mine, other = (t.view(torch.uint8).view(-1).numpy() for t in (a, b))
    row = place = 0
    for shape in shapes:
        end = place + shape[0] * shape[1]
        if not _see(mine[place:end], other[place:end], rooms[shape], seen, row, place):
            _see_again(a.view(-1)[place:end].view(shape), b.view(-1)[place:end].view(shape), seen, row)
        row, place = row + shape[0], end
        if sum(len(places) for _, _, places in seen.words) > WORDS_KEPT:
            _look_up(seen, width)
    row_error, row_signal = _added_up(seen, cut)
    sums = float(row_error.sum()), float(row_signal.sum()), seen.product, seen.largest, seen.odd
    return sums, row_error, row_signal


def _see(mine: np.ndarray, other: np.ndarray, room: _Room, seen: _Seen, row: int, place: int) -> bool:
    """Whether a block of codes [n] has no NaN; then it is written down. `row`: its first among those of all blocks;
    `place`: of its first code."""
    own, oracle = _words(mine, room.own), _words(other, room.oracle)
    np.not_equal(own, oracle, out=room.differ)  # first, as both come from memory faster together
    np.bitwise_and(oracle, _MAGNITUDES, out=room.bits)
    if room.bytes.max() == _NAN:
        return False
    cells = seen.cells[:, : room.parts, row : row + room.shape[0]]
    places = np.flatnonzero(room.differ)
    if len(places) > DENSE_SHARE * len(room.differ):
        return _see_all(own, oracle, room, seen, cells)
    if len(places):
        own, oracle = own[places], oracle[places]
        if (own.view(np.uint8) & _NAN == _NAN).any():
            return False
        seen.words.append((own, oracle, place + WORD * places))
    wide = _widened(room.bits, room, 0, signed=False)
    _products(wide, wide, cells[1])
    return True


def _see_all(own: np.ndarray, oracle: np.ndarray, room: _Room, seen: _Seen, cells: np.ndarray) -> bool:
    """The same of a block whose oracle has no NaN, from all of its codes."""
    np.bitwise_and(own, _MAGNITUDES, out=room.bits)
    if room.bytes.max() == _NAN:
        return False
    e, wide = (_widened(words, room, side, signed=True) for side, words in enumerate((own, oracle)))
    e -= wide
    for (one, another), into in zip(((e, e), (wide, wide), (e, wide)), cells, strict=True):
        _products(one, another, into)
    seen.largest = max(seen.largest, float(e.max()) * SCALE, -float(e.min()) * SCALE)
    return True


def _see_again(a: torch.Tensor, b: torch.Tensor, seen: _Seen, row: int) -> None:
    """Writes a block down by way of float64."""
    error, signal, product, largest, odd = careful(a, b)
    seen.again[row] = error, signal
    seen.product, seen.largest, seen.odd = seen.product + product, max(seen.largest, largest), seen.odd + odd


def _added_up(seen: _Seen, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """Row errors and row signals of all blocks."""
    _look_up(seen, cut.width)
    error, signal, product = torch.from_numpy(seen.cells).double().sum(1).mul_(SCALE**2)
    seen.product += float(product.sum())
    for row, (errors, signals) in seen.again.items():
        error[row : row + len(errors)], signal[row : row + len(signals)] = errors, signals
    return cut.of_rows(error).add_(seen.row_error), cut.of_rows(signal)


def _look_up(seen: _Seen, width: int) -> None:
    """Adds what the words that differ say; they have no NaN."""
    if not seen.words:
        return
    mine, other, places = (np.concatenate(parts) for parts in zip(*seen.words, strict=True))
    mine, other = mine.view(np.uint8), other.view(np.uint8)
    at = np.flatnonzero(mine != other)
    truth = _VALUES[other[at]]
    e = _VALUES[mine[at]] - truth
    rows = (places[at // WORD] + at % WORD) // width
    seen.row_error += torch.from_numpy(np.bincount(rows, e * e, minlength=len(seen.row_error)))
    seen.product += float(e @ truth)
    seen.largest = max(seen.largest, float(np.abs(e).max()))
    seen.words.clear()


def _words(codes: np.ndarray, into: np.ndarray) -> np.ndarray:
    """Codes [n] as words of eight, the last of them filled up with the zeros that are in `into`."""
    if len(codes) % WORD == 0:
        return codes.view(np.int64)
    into.view(np.uint8)[: len(codes)] = codes
    return into


def _widened(words: np.ndarray, room: _Room, side: int, *, signed: bool) -> np.ndarray:
    """Values over `SCALE` of a block of codes, in the room of one side. With `signed` off the codes are magnitudes, and
    signs of values mean nothing."""
    halves = room.halves[side]
    if room.parts == 1:
        np.copyto(halves[0], words.view(np.int8)[: halves.size])
        halves[0] *= 1 << 7
        halves[0] &= _WITHOUT_SECOND
    else:
        pairs, (even, odd) = words.view(np.int16)[: halves.shape[1]], halves
        np.multiply(pairs, 1 << 8 if signed else 1 << 7, out=even)
        if signed:
            even >>= 1
            even &= _SIGN_AND_SEVEN
        np.right_shift(pairs, 1, out=odd)
        odd &= _SIGN_AND_SEVEN if signed else _SEVEN
    room.floats[side].copy_(room.halves16[side])
    return room.wide[side]


def _products(one: np.ndarray, another: np.ndarray, into: np.ndarray) -> None:
    """The sum of products of every row of two arrays [parts, rows, n], into [parts, rows]."""
    np.matmul(one[..., None, :], another[..., None], out=into[..., None, None])
