"""The statistics of a pair of E4M3 tensors on a CPU by torch operators, from their codes.

Torch turns these codes into numbers one at a time, so nothing is converted that need not be: words of eight codes that
are the same on both sides have no error, and where few differ only their codes are looked up. All others go by way of
float16, where a code means what it means over `SCALE`, and exactly, once its seven low bits are moved to exponent and
mantissa. Codes at even and at odd places lie in different bytes of a word of sixteen bits and are moved apart.
"""

from __future__ import annotations

import numpy as np
import torch

from day0check.compare.pair_statistics_torch import Cut, Sums, careful

BLOCK_CODES = 2**19  # for each thread
SCALE = 2.0**8
DENSE_SHARE = 1 / 16  # from so many words that differ on, it is quicker to widen all
WORD = 8
_MAGNITUDES, _NAN = torch.tensor(0x7F7F7F7F7F7F7F7F), 0x7F
_SEVEN, _SIGN_AND_SEVEN, _WITHOUT_SECOND = 0x3F80, -0x4080, -0x4001  # of sixteen bits: where those of a code end up
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()

Found = tuple[torch.Tensor, torch.Tensor, float, float, int]  # row errors, row signals, product, largest, odd


class _Room:
    """What blocks of this shape are worked on in, made once: words of both sides where theirs cannot be read as such,
    magnitudes of codes, which words differ, and of each side float16 codes and float32 values.

    Values of a block lie as [rows, columns], or as [2 rows, columns / 2], first the even places of all rows.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.shape = shape
        rows, columns = shape
        self.parts = 1 if columns % 2 else 2
        codes = rows * columns
        words = -(-codes // WORD)
        self.own, self.oracle, self.bits = torch.zeros((3, words), dtype=torch.int64)
        self.bytes = self.bits.view(torch.int8)
        self.differ = torch.empty((words,), dtype=torch.bool)
        self.halves = [half.view(self.parts, -1) for half in torch.empty((2, codes), dtype=torch.int16)]
        wide = torch.empty((2, codes), dtype=torch.float32)
        self.wide = [values.view(self.parts * rows, columns // self.parts) for values in wide]
        self.into = [
            (values.view(self.parts, -1), half.view(torch.float16))
            for values, half in zip(wide, self.halves, strict=True)
        ]
        self.norms = torch.empty((self.parts * rows,), dtype=torch.float32)

    def of_rows(self, cells: torch.Tensor) -> torch.Tensor:
        """Sums over the parts of each row, in the square of what values are in."""
        return cells.double().view(self.parts, -1).sum(0).mul_(SCALE**2)


def statistics(a: torch.Tensor, b: torch.Tensor) -> tuple[Sums, torch.Tensor, torch.Tensor]:
    """((error, signal, product, largest, odd), row errors, row signals) of two contiguous E4M3 tensors [R, C]."""
    rows, width = a.shape
    row_error, row_signal = torch.zeros((2, rows), dtype=torch.float64)
    if not a.numel():
        return (0.0, 0.0, 0.0, 0.0, 0), row_error, row_signal
    shapes = Cut.of(rows, width, elements=BLOCK_CODES * torch.get_num_threads()).shapes()
    rooms = {shape: _Room(shape) for shape in set(shapes)}
    sizes = [count * columns for count, columns in shapes]
    begin, product, largest, odd = 0, 0.0, 0.0, 0
    for shape, x, o in zip(shapes, a.view(-1).split(sizes), b.view(-1).split(sizes), strict=True):
        error, signal, p, m, unlike = _block(x, o, rooms[shape])
        here = slice(begin // width, begin // width + shape[0])
        row_error[here] += error
        row_signal[here] += signal
        product, largest, odd = product + p, max(largest, m), odd + unlike
        begin += x.numel()
    return (float(row_error.sum()), float(row_signal.sum()), product, largest, odd), row_error, row_signal


def _block(x: torch.Tensor, o: torch.Tensor, room: _Room) -> Found:
    own, oracle = _words(x, room.own), _words(o, room.oracle)
    torch.bitwise_and(oracle, _MAGNITUDES, out=room.bits)
    found = None
    if int(room.bytes.amax()) != _NAN:
        places = np.flatnonzero(torch.ne(own, oracle, out=room.differ).numpy())
        many = len(places) > DENSE_SHARE * own.numel()
        found = _dense(own, oracle, room) if many else _sparse(own, oracle, places, room)
    return careful(x.view(room.shape), o.view(room.shape)) if found is None else found


def _words(codes: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Codes [n] as words of eight, the last of them filled up with zeros."""
    codes, count = codes.view(torch.int8), codes.numel()
    if count % WORD == 0 and codes.storage_offset() % WORD == 0:
        return codes.view(torch.int64)
    into[-1] = 0
    into.view(torch.int8)[:count].copy_(codes)
    return into


def _sparse(own: torch.Tensor, oracle: torch.Tensor, places: np.ndarray, room: _Room) -> Found | None:
    """From the codes of the words at `places`, which are all that differ; None where one of them is NaN. The
    magnitudes of the oracle's codes are in `room.bits`."""
    rows, columns = room.shape
    wide = _widened(room.bits, room, 0, signed=False)
    signal = room.of_rows(torch.linalg.vector_norm(wide, dim=1, out=room.norms).double().square_())
    if not len(places):
        return torch.zeros_like(signal), signal, 0.0, 0.0, 0
    mine, other = (words.numpy()[places].view(np.uint8) for words in (own, oracle))
    at = np.flatnonzero(mine != other)
    values, truth = _VALUES[mine[at]], _VALUES[other[at]]
    if np.isnan(values).any():
        return None
    e = values - truth
    row = (places[at // WORD] * WORD + at % WORD) // columns
    error = torch.from_numpy(np.bincount(row, e * e, minlength=rows))
    return error, signal, float(e @ truth), float(np.abs(e).max()), 0


def _dense(own: torch.Tensor, oracle: torch.Tensor, room: _Room) -> Found | None:
    """From all codes in float32, where the oracle has no NaN; None where the other side has one."""
    torch.bitwise_and(own, _MAGNITUDES, out=room.bits)
    if int(room.bytes.amax()) == _NAN:
        return None
    e, wide = (_widened(words, room, side, signed=True) for side, words in enumerate((own, oracle)))
    e.sub_(wide)
    product = float(torch.dot(e.view(-1), wide.view(-1)))
    error = room.of_rows(torch.sum(e.mul_(e), 1))
    signal = room.of_rows(torch.linalg.vector_norm(wide, dim=1, out=room.norms).double().square_())
    largest = float(e.view(torch.int32).amax().view(torch.float32).double().sqrt().float())
    return error, signal, product * SCALE**2, largest * SCALE, 0


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
    values, codes = room.into[side]
    values.copy_(codes)
    return room.wide[side]
