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

SCALE = 2.0**8
DENSE_SHARE = 1 / 16  # from so many words that differ on, it is quicker to widen all
WORD = 8
_MAGNITUDES, _NAN = 0x7F7F7F7F7F7F7F7F, 0x7F
_SEVEN, _SIGN_AND_SEVEN, _WITHOUT_SECOND = 0x3F80, -0x4080, -0x4001  # of sixteen bits: where those of a code end up
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()

Found = tuple[torch.Tensor, torch.Tensor, float, float, int]  # row errors, row signals, product, largest, odd


class _Room:
    """What blocks of at most so many codes are worked on in: made once."""

    def __init__(self, codes: int) -> None:
        words = -(-codes // WORD)
        self.own, self.oracle, self.bits = torch.zeros((3, words), dtype=torch.int64)
        self.differ = torch.empty((words,), dtype=torch.bool)
        self.halves = torch.empty((2, codes), dtype=torch.int16)
        self.wide = torch.empty((2, codes), dtype=torch.float32)


def statistics(a: torch.Tensor, b: torch.Tensor) -> tuple[Sums, torch.Tensor, torch.Tensor]:
    """((error, signal, product, largest, odd), row errors, row signals) of two contiguous E4M3 tensors [R, C]."""
    rows, width = a.shape
    row_error, row_signal = torch.zeros((2, rows), dtype=torch.float64)
    if not a.numel():
        return (0.0, 0.0, 0.0, 0.0, 0), row_error, row_signal
    shapes = Cut.of(rows, width).shapes()
    sizes = [r * c for r, c in shapes]
    blocks = zip(shapes, a.view(-1).split(sizes), b.view(-1).split(sizes), strict=True)
    room, begin, product, largest, odd = _Room(max(sizes)), 0, 0.0, 0.0, 0
    for (count, columns), x, o in blocks:
        e, s, p, m, unlike = _block(x, o, (count, columns), room)
        here = slice(begin // width, begin // width + count)
        row_error[here] += e
        row_signal[here] += s
        product, largest, odd = product + p, max(largest, m), odd + unlike
        begin += count * columns
    return (float(row_error.sum()), float(row_signal.sum()), product, largest, odd), row_error, row_signal


def _block(x: torch.Tensor, o: torch.Tensor, shape: tuple[int, int], room: _Room) -> Found:
    own, oracle = _words(x, room.own), _words(o, room.oracle)
    torch.ne(own, oracle, out=room.differ[: own.numel()])
    places = np.flatnonzero(room.differ[: own.numel()].numpy())
    bits = torch.bitwise_and(oracle, _MAGNITUDES, out=room.bits[: own.numel()])
    if int(bits.view(torch.int8).amax()) == _NAN:
        found = None
    elif len(places) > DENSE_SHARE * own.numel():
        found = _dense(own, oracle, shape, room)
    else:
        found = _sparse(own, oracle, places, shape, room)
    return careful(x.view(shape), o.view(shape)) if found is None else found


def _words(codes: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Codes [n] as words of eight, the last of them filled up with zeros."""
    codes, count = codes.view(torch.int8), codes.numel()
    if count % WORD == 0 and codes.storage_offset() % WORD == 0:
        return codes.view(torch.int64)
    into = into[: -(-count // WORD)]
    into[-1] = 0
    into.view(torch.int8)[:count].copy_(codes)
    return into


def _sparse(
    own: torch.Tensor, oracle: torch.Tensor, places: np.ndarray, shape: tuple[int, int], room: _Room
) -> Found | None:
    """From the codes of the words at `places`, which are all that differ; None where one of them is NaN."""
    rows, columns = shape
    signal = _signal(shape, room)
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


def _signal(shape: tuple[int, int], room: _Room) -> torch.Tensor:
    """Sums of squares [rows] of the codes whose magnitudes are in `room.bits`."""
    wide = _widened(room.bits, shape, room.halves[0], room.wide[0], signed=False)
    return _of_rows(torch.linalg.vector_norm(wide, dim=1).double().square_(), shape[0])


def _dense(own: torch.Tensor, oracle: torch.Tensor, shape: tuple[int, int], room: _Room) -> Found | None:
    """From all codes in float32, where the oracle has no NaN; None where the other side has one."""
    if int(torch.bitwise_and(own, _MAGNITUDES, out=room.bits[: own.numel()]).view(torch.int8).amax()) == _NAN:
        return None
    sides = zip((own, oracle), room.halves, room.wide, strict=True)
    e, wide = (_widened(words, shape, halves, into, signed=True) for words, halves, into in sides)
    e.sub_(wide)
    product = float(torch.dot(e.view(-1), wide.view(-1)))
    error = _of_rows(torch.sum(e.mul_(e), 1), shape[0])
    signal = _of_rows(torch.linalg.vector_norm(wide, dim=1).double().square_(), shape[0])
    largest = float(e.view(torch.int32).amax().view(torch.float32).double().sqrt().float())
    return error, signal, product * SCALE**2, largest * SCALE, 0


def _widened(
    words: torch.Tensor, shape: tuple[int, int], halves: torch.Tensor, wide: torch.Tensor, *, signed: bool
) -> torch.Tensor:
    """Values over `SCALE` of a block of codes: [rows, columns], or [2 rows, columns / 2], first the even places of all
    rows and then the odd ones. With `signed` off the codes are magnitudes, and signs of values mean nothing."""
    rows, columns = shape
    count = rows * columns
    halves, wide = halves[:count], wide[:count]
    if columns % 2:
        halves.copy_(words.view(torch.int8)[:count]).mul_(1 << 7).bitwise_and_(_WITHOUT_SECOND)
    else:
        pairs = words.view(torch.int16)[: count // 2]
        even, odd = halves.view(2, -1)
        torch.mul(pairs, 1 << 8 if signed else 1 << 7, out=even)
        torch.bitwise_right_shift(pairs, 1, out=odd)
        if signed:
            even.bitwise_right_shift_(1).bitwise_and_(_SIGN_AND_SEVEN)
        odd.bitwise_and_(_SIGN_AND_SEVEN if signed else _SEVEN)
        rows, columns = 2 * rows, columns // 2
    return wide.copy_(halves.view(torch.float16)).view(rows, columns)


def _of_rows(cells: torch.Tensor, rows: int) -> torch.Tensor:
    """Sums over the parts of each row, in the square of what values are in."""
    return cells.double().view(-1, rows).sum(0).mul_(SCALE**2)
