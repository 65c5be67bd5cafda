"""The compiled loops of `pair_statistics`: integer views of stored formats, widened in registers. Needs numba."""

from __future__ import annotations

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic

CHUNK = 4096  # elements whose sums are kept in float32
CODES = 512  # the same of one byte: the smaller, the more of them hold no difference
_VIEWS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float8_e4m3fn: torch.int8}


def statistics(a: torch.Tensor, b: torch.Tensor) -> tuple[tuple[float, ...], torch.Tensor, torch.Tensor]:
    """((error, signal, product, largest, odd), row errors, row signals) of two tensors [R, C] of one dtype."""
    views = [t.view(_VIEWS[t.dtype]).numpy() for t in (a, b)]
    loop = {torch.bfloat16: _bfloat16, torch.float32: _float32, torch.float8_e4m3fn: _e4m3}[a.dtype]
    row_error, row_signal = np.zeros(a.shape[0]), np.zeros(a.shape[0])
    totals = loop(*views, row_error, row_signal)
    return tuple(float(t) for t in totals), torch.from_numpy(row_error), torch.from_numpy(row_signal)


@intrinsic
def _as_float(typing, bits):
    """The float32 of these 32 bits."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return numba.float32(numba.int32), generate


@intrinsic
def _magnitude(typing, value):
    """The bits of |value|: of two magnitudes the larger has the larger bits."""

    def generate(context, builder, signature, arguments):
        bits = ir.IntType(32)
        return builder.and_(builder.bitcast(arguments[0], bits), bits(0x7FFFFFFF))

    return numba.int32(numba.float32), generate


@intrinsic
def _larger(typing, one, other):
    """The larger of two int32 as int32: `max` makes int64 of them, of which a register holds half as many."""

    def generate(context, builder, signature, arguments):
        return builder.select(builder.icmp_signed(">", *arguments), *arguments)

    return numba.int32(numba.int32, numba.int32), generate


@numba.njit(inline="always")
def _of_float32(code):
    return _as_float(np.int32(code))


@numba.njit(inline="always")
def _of_bfloat16(code):
    return _as_float(np.int32(code) << np.int32(16))


@numba.njit(inline="always")
def _of_e4m3(code):
    """The seven low bits are moved to the exponent and mantissa of float32 and scaled from bias 7 to 127, subnormals
    included. NaN becomes 480: the loops look for its code first."""
    return _as_float((np.int32(code) << np.int32(20)) & np.int32(-0x78100000)) * np.float32(2.0**120)


@numba.njit(inline="always")
def _never(code):
    return False


@numba.njit(inline="always")
def _is_nan_e4m3(code):
    return (code & 0x7F) == 0x7F


@numba.njit(inline="always")
def _unlike(a, b, own, other, left, right):
    return False, False


@numba.njit(inline="always")
def _edges(left, right, size):
    """Of a range of codes: the first and the last whole word of `size` codes, and the ranges before and behind them."""
    first, last = (left + size - 1) // size, right // size
    last = max(first, last)
    return first, last, min(size * first, right), max(size * last, left)


@numba.njit(inline="always")
def _same_codes(a, b, own, other, left, right):
    """(whether two ranges of codes are the same, whether the second holds NaN); `own` and `other` are the flat arrays
    as words of eight codes. Adding one to the seven low bits of a code carries into the eighth where all are set."""
    first, last, before, behind = _edges(left, right, 8)
    differ = found = np.int64(0)
    for i in range(np.uint64(first), np.uint64(last)):
        differ |= own[i] ^ other[i]
        found |= (other[i] & 0x7F7F7F7F7F7F7F7F) + 0x0101010101010101
    nan = (found & np.int64(-0x7F7F7F7F7F7F7F80)) != 0
    for begin, end in ((left, before), (behind, right)):
        for i in range(begin, end):
            differ |= a[i] ^ b[i]
            nan |= _is_nan_e4m3(b[i])
    return differ == 0, nan


@numba.njit(inline="always")
def _holds_nan_e4m3(codes, words, left, right):
    first, last, before, behind = _edges(left, right, 8)
    found = np.int64(0)
    for i in range(np.uint64(first), np.uint64(last)):
        found |= (words[i] & 0x7F7F7F7F7F7F7F7F) + 0x0101010101010101
    rest = False
    for begin, end in ((left, before), (behind, right)):
        for i in range(begin, end):
            rest |= _is_nan_e4m3(codes[i])
    return rest or (found & np.int64(-0x7F7F7F7F7F7F7F80)) != 0


@numba.njit(inline="always")
def _square_of_e4m3(bits):
    """Of a magnitude whose seven bits lie where float32 has the low exponent bits and the first of the mantissa."""
    o = _as_float(np.int32(bits)) * np.float32(2.0**120)
    return o * o


@numba.njit(inline="always")
def _signal_e4m3(codes, quads, left, right):
    """Sum of squares of a range of codes, four of a word at a time without unpacking it."""
    first, last, before, behind = _edges(left, right, 8)
    signal = np.float32(0)
    for i in range(np.uint64(2 * first), np.uint64(2 * last)):
        quad = quads[i]
        signal += _square_of_e4m3((quad & np.int32(0x7F)) << np.int32(20))
        signal += _square_of_e4m3((quad & np.int32(0x7F00)) << np.int32(12))
        signal += _square_of_e4m3((quad & np.int32(0x7F0000)) << np.int32(4))
        signal += _square_of_e4m3((quad & np.int32(0x7F000000)) >> np.int32(4))
    for begin, end in ((left, before), (behind, right)):
        for i in range(begin, end):
            signal += _square_of_e4m3((np.int32(codes[i]) & np.int32(0x7F)) << np.int32(20))
    return signal


@numba.njit(inline="always")
def _no_signal(codes, quads, left, right):
    return np.float32(0)


@numba.njit(inline="always")
def _holds_none(codes, words, left, right):
    return False


def _made(widen, is_nan, chunk, same=_unlike, holds_nan=_holds_none, signal_alone=_no_signal):
    """The loop over rows of a pair whose codes `widen` turns into float32, save those that `is_nan` knows, in chunks
    whose sums float32 holds. Of a chunk `same` says whether both sides are alike, and then `signal_alone` is all there
    is, and whether the oracle holds a NaN that `widen` makes a number of; `holds_nan` whether the other side does."""

    @numba.njit(inline="always")
    def sums(a, b, left, right):
        """Of a chunk: sums of e^2, o^2 and e o, the largest |e|."""
        error, signal, product, largest = np.float32(0), np.float32(0), np.float32(0), np.int32(0)
        for i in range(np.uint64(left), np.uint64(right)):  # an index that may be negative is looked at before use
            o = widen(b[i])
            e = widen(a[i]) - o
            error += e * e
            signal += o * o
            product += e * o
            largest = _larger(largest, _magnitude(e))
        return error, signal, product, _as_float(largest)

    @numba.njit
    def careful(a, b, left, right):
        """The sums without what is no finite number, and how many of those have other bits."""
        error, signal, product, largest = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        odd = 0
        for i in range(left, right):
            x, o = widen(a[i]), widen(b[i])
            if is_nan(a[i]) or is_nan(b[i]) or not (np.isfinite(x) and np.isfinite(o)):
                odd += a[i] != b[i]
                continue
            e = x - o
            error += e * e
            signal += o * o
            product += e * o
            largest = max(largest, abs(e))
        return error, signal, product, largest, odd

    @numba.njit(fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
    def over_rows(a, b, row_error, row_signal):
        rows, width = a.shape
        a, b = a.reshape(-1), b.reshape(-1)
        whole = a.size * a.itemsize // 8 * 8 // a.itemsize
        own, other = a[:whole].view(np.int64), b[:whole].view(np.int64)
        quads = other.view(np.int32)
        error = signal = product = largest = 0.0
        odd = 0
        for r in range(rows):
            for left in range(r * width, (r + 1) * width, chunk):
                right = min(left + chunk, (r + 1) * width)
                alike, nan = same(a, b, own, other, left, right)
                nan = nan or (not alike and holds_nan(a, own, left, right))
                e = p = m = np.float32(0)
                w = 0
                if alike:
                    s = signal_alone(b, quads, left, right)
                else:
                    e, s, p, m = sums(a, b, left, right)
                if nan or not (np.isfinite(e) and np.isfinite(s)):
                    e, s, p, m, w = careful(a, b, left, right)
                row_error[r] += e
                row_signal[r] += s
                product += p
                largest = max(largest, m)
                odd += w
            error += row_error[r]
            signal += row_signal[r]
        return error, signal, product, largest, odd

    return over_rows


_bfloat16, _float32 = (_made(widen, _never, CHUNK) for widen in (_of_bfloat16, _of_float32))
_e4m3 = _made(_of_e4m3, _is_nan_e4m3, CODES, _same_codes, _holds_nan_e4m3, _signal_e4m3)


@numba.njit
def read(words):
    """The sum of int64 words: nothing but reading, to measure a bandwidth by."""
    total = np.int64(0)
    for i in range(words.shape[0]):
        total += words[i]
    return total
