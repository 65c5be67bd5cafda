"""The statistics of a pair of E4M3 tensors on a CPU by torch operators, from their codes.

Torch turns these codes into numbers one at a time, so nothing is converted that need not be: words of eight codes that
are the same on both sides have no error, and where few differ only their codes are looked up. All others go by way of
float16, where a code means what it means over `SCALE`, and exactly, once its seven low bits are moved to exponent and
mantissa. Codes at even and at odd places lie in different bytes of a word of sixteen bits and are moved apart. What is
found of a block is only written down; it is added up for all blocks at once, which saves as much as a pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from day0check.compare.pair_statistics_torch import Cut, Sums, careful

BLOCK_CODES = 2**19  # for each thread
SCALE = 2.0**8
WORDS_KEPT = 2**16  # words that differ, of 24 bytes each with what is kept of them, before they are looked up
DENSE_SHARE = 1 / 16  # from so many words that differ on, it is quicker to widen all
WORD = 8
_MAGNITUDES, _NAN = torch.tensor(0x7F7F7F7F7F7F7F7F), 0x7F
_SEVEN, _SIGN_AND_SEVEN, _WITHOUT_SECOND = 0x3F80, -0x4080, -0x4001  # of sixteen bits: where those of a code end up
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()


class _Room:
    """What blocks of this shape are worked on in, made once: words of both sides where theirs cannot be read as such,
    magnitudes of codes, which words differ, and of each side float16 codes and float32 values.

    Values of a block lie as [parts, rows, columns / parts], first the even places of all rows and then the odd ones.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        rows, columns = shape
        self.parts = 1 if columns % 2 else 2
        codes = rows * columns
        self.own, self.oracle, self.bits = torch.zeros((3, -(-codes // WORD)), dtype=torch.int64)
        self.bytes = self.bits.view(torch.int8)
        self.differ = torch.empty((len(self.bits),), dtype=torch.bool)
        self.halves = torch.empty((2, codes), dtype=torch.int16).view(2, self.parts, -1)
        self.floats = torch.empty((2, codes), dtype=torch.float32).view(2, self.parts, -1)
        self.wide = self.floats.view(2, self.parts, rows, columns // self.parts)
        self.halves16 = self.halves.view(torch.float16)


@dataclass
class _Seen:
    """What was found of the blocks: `cells` float32 [error, signal; parts; rows of blocks] over `SCALE` (the signal as
    norms); words that differ and are not looked up yet, with the place of the first code of each; what was done again
    in float64."""

    cells: torch.Tensor
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
    cut = Cut.of(rows, width, elements=BLOCK_CODES * torch.get_num_threads())
    shapes = cut.shapes()
    rooms = {shape: _Room(shape) for shape in set(shapes)}
    sizes = [count * columns for count, columns in shapes]
    seen = _Seen(torch.zeros((2, 2, sum(count for count, _ in shapes))), torch.zeros(rows, dtype=torch.float64))
    row = place = 0
    for shape, x, o in zip(shapes, a.view(-1).split(sizes), b.view(-1).split(sizes), strict=True):
        if not _see(x, o, rooms[shape], seen, row, place):
            error, signal, product, largest, odd = careful(x.view(shape), o.view(shape))
            seen.again[row] = error, signal
            seen.product, seen.largest, seen.odd = seen.product + product, max(seen.largest, largest), seen.odd + odd
        row, place = row + shape[0], place + x.numel()
        if sum(len(places) for _, _, places in seen.words) > WORDS_KEPT:
            _look_up(seen, width)
    row_error, row_signal = _added_up(seen, cut)
    sums = float(row_error.sum()), float(row_signal.sum()), seen.product, seen.largest, seen.odd
    return sums, row_error, row_signal


def _see(x: torch.Tensor, o: torch.Tensor, room: _Room, seen: _Seen, row: int, place: int) -> bool:
    """Whether a block has no NaN; then it is written down. `row`: its first among those of all blocks; `place`: of its
    first code."""
    own, oracle = _words(x, room.own), _words(o, room.oracle)
    torch.bitwise_and(oracle, _MAGNITUDES, out=room.bits)
    if int(room.bytes.amax()) == _NAN:
        return False
    error, signal = seen.cells[:, : room.parts, row : row + room.shape[0]]
    places = np.flatnonzero(torch.ne(own, oracle, out=room.differ).numpy())
    if len(places) > DENSE_SHARE * len(room.differ):
        return _see_all(own, oracle, room, seen, error, signal)
    if len(places):
        mine, other = own.numpy()[places], oracle.numpy()[places]
        if (mine.view(np.uint8) & _NAN == _NAN).any():
            return False
        seen.words.append((mine, other, place + WORD * places))
    torch.linalg.vector_norm(_widened(room.bits, room, 0, signed=False), dim=2, out=signal)
    return True


def _see_all(
    own: torch.Tensor, oracle: torch.Tensor, room: _Room, seen: _Seen, error: torch.Tensor, signal: torch.Tensor
) -> bool:
    """The same of a block whose oracle has no NaN, from all of its codes."""
    torch.bitwise_and(own, _MAGNITUDES, out=room.bits)
    if int(room.bytes.amax()) == _NAN:
        return False
    e, wide = (_widened(words, room, side, signed=True) for side, words in enumerate((own, oracle)))
    e.sub_(wide)
    seen.product += float(torch.dot(e.view(-1), wide.view(-1))) * SCALE**2
    torch.linalg.vector_norm(wide, dim=2, out=signal)
    torch.sum(e.mul_(e), 2, out=error)
    largest = float(e.view(torch.int32).amax().view(torch.float32).double().sqrt().float()) * SCALE
    seen.largest = max(seen.largest, largest)
    return True


def _added_up(seen: _Seen, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """Row errors and row signals of all blocks."""
    _look_up(seen, cut.width)
    error, signal = seen.cells.double()
    error, signal = (cells.sum(0).mul_(SCALE**2) for cells in (error, signal.square_()))
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


def _words(codes: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Codes [n] as words of eight, the last of them filled up with the zeros that are in `into`."""
    codes, count = codes.view(torch.int8), codes.numel()
    if count % WORD == 0 and codes.storage_offset() % WORD == 0:
        return codes.view(torch.int64)
    into.view(torch.int8)[:count].copy_(codes)
    return into


def _widened(words: torch.Tensor, room: _Room, side: int, *, signed: bool) -> torch.Tensor:
    """Values over `SCALE` of a block of codes, in the room of one side. With `signed` off the codes are magnitudes, and
    signs of values mean nothing."""
    halves = room.halves[side]
    if room.parts == 1:
        halves[0].copy_(words.view(torch.int8)[: halves.numel()]).mul_(1 << 7).bitwise_and_(_WITHOUT_SECOND)
    else:
        pairs, (even, odd) = words.view(torch.int16)[: halves.shape[1]], halves
        torch.mul(pairs, 1 << 8 if signed else 1 << 7, out=even)
        torch.bitwise_right_shift(pairs, 1, out=odd)
        if signed:
            even.bitwise_right_shift_(1).bitwise_and_(_SIGN_AND_SEVEN)
        odd.bitwise_and_(_SIGN_AND_SEVEN if signed else _SEVEN)
    room.floats[side].copy_(room.halves16[side])
    return room.wide[side]
