"""The statistics of a pair of E4M3 tensors on a CPU without a compiled loop, from their codes.

Torch turns these codes into numbers one at a time, so nothing is converted that need not be: words of eight codes that
are the same on both sides have no error, and where few differ only their codes are looked up. All others go by way of
float16, where a code means what it means over `SCALE`, and exactly, once its seven low bits are moved to exponent and
mantissa. Codes at even and at odd places lie in different bytes of a word of sixteen bits and are moved apart. Blocks
fit into the second cache, and each of torch's threads has its own run of them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from day0check.compare.pair_statistics_torch import Cut, Sums, careful

BLOCK_CODES = 2**17
PIECE = 2**15  # from more elements on torch would share out a conversion among threads of its own
SCALE = 2.0**8
DENSE_SHARE = 1 / 16  # from so many words that differ on, it is quicker to widen all
WORD = 8
_MAGNITUDES, _NAN = np.int64(0x7F7F7F7F7F7F7F7F), 0x7F
_TO_HALF, _TO_SIGN = np.int16(1 << 7), np.int16(1 << 8)
_SEVEN, _SIGN_AND_SEVEN, _WITHOUT_SECOND = np.int16(0x3F80), np.int16(-0x4080), np.int16(-0x4001)
_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()

Found = tuple[np.ndarray, np.ndarray, float, float, int]  # row errors, row signals, product, largest, odd


@dataclass(frozen=True)
class _Block:
    """Codes of whole rows, or of a piece of one, from element `begin` on."""

    begin: int
    shape: tuple[int, int]
    own: torch.Tensor
    oracle: torch.Tensor


class _Room:
    """What blocks of at most so many codes are worked on in, made once for each thread."""

    def __init__(self, codes: int) -> None:
        words = -(-codes // WORD)
        self.own, self.oracle, self.bits = np.zeros((3, words), dtype=np.int64)
        self.differ = np.empty(words, dtype=bool)
        self.halves = torch.empty((2, codes), dtype=torch.int16)
        self.wide = torch.empty((2, codes), dtype=torch.float32)


def statistics(a: torch.Tensor, b: torch.Tensor) -> tuple[Sums, torch.Tensor, torch.Tensor]:
    """((error, signal, product, largest, odd), row errors, row signals) of two contiguous E4M3 tensors [R, C]."""
    rows, width = a.shape
    row_error, row_signal = np.zeros((2, rows))
    if not a.numel():
        return (0.0, 0.0, 0.0, 0.0, 0), torch.from_numpy(row_error), torch.from_numpy(row_signal)
    blocks = _blocks(a, b)
    runs = min(torch.get_num_threads(), len(blocks))
    edges = [len(blocks) * run // runs for run in range(runs + 1)]
    parts = [blocks[i:j] for i, j in pairwise(edges)]
    rooms = [_Room(max(block.own.numel() for block in part)) for part in parts]
    with ThreadPoolExecutor(runs) as threads:
        by = map if runs == 1 else threads.map  # one alone stays in the thread that asks
        found = list(by(lambda part, room: [_of_block(block, room) for block in part], parts, rooms))
    product, largest, odd = 0.0, 0.0, 0
    for block, (error, signal, p, m, unlike) in zip(blocks, [f for run in found for f in run], strict=True):
        here = slice(block.begin // width, block.begin // width + block.shape[0])
        row_error[here] += error
        row_signal[here] += signal
        product, largest, odd = product + p, max(largest, m), odd + unlike
    sums = float(row_error.sum()), float(row_signal.sum()), product, largest, odd
    return sums, torch.from_numpy(row_error), torch.from_numpy(row_signal)


def _blocks(a: torch.Tensor, b: torch.Tensor) -> list[_Block]:
    shapes = Cut.of(*a.shape, elements=BLOCK_CODES).shapes()
    sizes = [rows * columns for rows, columns in shapes]
    begins = np.cumsum([0, *sizes[:-1]]).tolist()
    return [
        _Block(*parts) for parts in zip(begins, shapes, a.view(-1).split(sizes), b.view(-1).split(sizes), strict=True)
    ]


def _of_block(block: _Block, room: _Room) -> Found:
    own, oracle = _words(block.own, room.own), _words(block.oracle, room.oracle)
    count, found = len(own), None
    np.bitwise_and(oracle, _MAGNITUDES, out=room.bits[:count])
    if room.bits[:count].view(np.int8).max() != _NAN:
        places = np.flatnonzero(np.not_equal(own, oracle, out=room.differ[:count]))
        many = len(places) > DENSE_SHARE * count
        found = _dense(own, oracle, block.shape, room) if many else _sparse(own, oracle, places, block.shape, room)
    if found is not None:
        return found
    error, signal, *rest = careful(block.own.view(block.shape), block.oracle.view(block.shape))
    return error.numpy(), signal.numpy(), *rest


def _words(codes: torch.Tensor, into: np.ndarray) -> np.ndarray:
    """Codes [n] as words of eight, the last of them filled up with zeros."""
    codes, count = codes.view(torch.int8), codes.numel()
    if count % WORD == 0 and codes.storage_offset() % WORD == 0:
        return codes.numpy().view(np.int64)
    into = into[: -(-count // WORD)]
    into[-1] = 0
    into.view(np.int8)[:count] = codes.numpy()
    return into


def _sparse(
    own: np.ndarray, oracle: np.ndarray, places: np.ndarray, shape: tuple[int, int], room: _Room
) -> Found | None:
    """From the codes of the words at `places`, which are all that differ; None where one of them is NaN. The
    magnitudes of the oracle's codes are in `room.bits`."""
    rows, columns = shape
    wide = _widened(room.bits, shape, room.halves[0], room.wide[0], signed=False)
    signal = _of_rows(_dots(wide, wide), rows)
    if not len(places):
        return np.zeros(rows), signal, 0.0, 0.0, 0
    mine, other = (words[places].view(np.uint8) for words in (own, oracle))
    at = np.flatnonzero(mine != other)
    values, truth = _VALUES[mine[at]], _VALUES[other[at]]
    if np.isnan(values).any():
        return None
    e = values - truth
    row = (places[at // WORD] * WORD + at % WORD) // columns
    return np.bincount(row, e * e, minlength=rows), signal, float(e @ truth), float(np.abs(e).max()), 0


def _dense(own: np.ndarray, oracle: np.ndarray, shape: tuple[int, int], room: _Room) -> Found | None:
    """From all codes in float32, where the oracle has no NaN; None where the other side has one."""
    if np.bitwise_and(own, _MAGNITUDES, out=room.bits[: len(own)]).view(np.int8).max() == _NAN:
        return None
    sides = zip((own, oracle), room.halves, room.wide, strict=True)
    e, wide = (_widened(words, shape, halves, into, signed=True) for words, halves, into in sides)
    np.subtract(e, wide, out=e)
    error, signal = (_of_rows(_dots(values, values), shape[0]) for values in (e, wide))
    product = float(_dots(e, wide).sum(dtype=np.float64)) * SCALE**2
    return error, signal, product, float(max(e.max(), -e.min())) * SCALE, 0


def _widened(
    words: np.ndarray, shape: tuple[int, int], halves: torch.Tensor, wide: torch.Tensor, *, signed: bool
) -> np.ndarray:
    """Values over `SCALE` of a block of codes: [rows, columns], or [2 rows, columns / 2], first the even places of all
    rows and then the odd ones. With `signed` off the codes are magnitudes, and signs of values mean nothing."""
    rows, columns = shape
    count = rows * columns
    halves, wide = halves[:count], wide[:count]
    moved = halves.numpy()
    if columns % 2:
        np.multiply(words.view(np.int8)[:count], _TO_HALF, out=moved)
        np.bitwise_and(moved, _WITHOUT_SECOND, out=moved)
    else:
        pairs, (even, odd) = words.view(np.int16)[: count // 2], moved.reshape(2, -1)
        np.multiply(pairs, _TO_SIGN if signed else _TO_HALF, out=even)
        np.right_shift(pairs, 1, out=odd)
        if signed:
            np.bitwise_and(np.right_shift(even, 1, out=even), _SIGN_AND_SEVEN, out=even)
        np.bitwise_and(odd, _SIGN_AND_SEVEN if signed else _SEVEN, out=odd)
        rows, columns = 2 * rows, columns // 2
    for into, half in zip(wide.split(PIECE), halves.view(torch.float16).split(PIECE), strict=True):
        into.copy_(half)
    return wide.numpy().reshape(rows, columns)


def _dots(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[rows] of two matrices: the product of each row of the one with that of the other."""
    return np.matmul(x[:, None, :], y[:, :, None]).reshape(-1)


def _of_rows(cells: np.ndarray, rows: int) -> np.ndarray:
    """Sums over the parts of each row, in the square of what values are in."""
    return cells.reshape(-1, rows).sum(0, dtype=np.float64) * SCALE**2
