"""The compiled loops of `pair_statistics`: integer views of stored formats, widened in registers. Needs numba."""

from __future__ import annotations

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic

CHUNK = 4096  # elements whose sums are kept in float32
CODES = 1024  # the same of one byte: the smaller, the more of them hold no difference
REORDERED = {"reassoc", "contract", "nsz"}
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
def _plain(a, b, own, other, left, right):
    return False, False


@numba.njit
def _looked_at_e4m3(a, b, own, other, left, right):
    """(whether two ranges of codes are the same, whether one holds NaN), from eight codes at a time: adding one to the
    seven low bits carries into the eighth where all seven are set. `own` and `other` are the flat arrays as words."""
    first, last = (left + 7) // 8, right // 8
    differ = nan = np.int64(0)
    for i in range(np.uint64(first), np.uint64(max(first, last))):
        differ |= own[i] ^ other[i]
        nan |= (own[i] & 0x7F7F7F7F7F7F7F7F) + 0x0101010101010101
        nan |= (other[i] & 0x7F7F7F7F7F7F7F7F) + 0x0101010101010101
    rest = False
    for begin, end in ((left, min(8 * first, right)), (max(8 * last, left), right)):
        for i in range(begin, end):
            differ |= a[i] ^ b[i]
            rest |= _is_nan_e4m3(a[i]) or _is_nan_e4m3(b[i])
    return differ == 0, rest or (nan & np.int64(-0x7F7F7F7F7F7F7F80)) != 0


def _made(widen, is_nan, looked_at, chunk):
    """The loop over rows of a pair whose codes `widen` turns into float32, save those that `is_nan` knows, in chunks
    whose sums float32 holds; `looked_at` says of a chunk whether all of it is the same and whether it holds NaN."""

    @numba.njit(fastmath=REORDERED, error_model="numpy")
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

    @numba.njit(fastmath=REORDERED, error_model="numpy")
    def signal_alone(b, left, right):
        signal = np.float32(0)
        for i in range(np.uint64(left), np.uint64(right)):
            o = widen(b[i])
            signal += o * o
        return signal

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

    @numba.njit
    def of_chunk(a, b, own, other, left, right):
        alike, nan = looked_at(a, b, own, other, left, right)
        if nan:
            return careful(a, b, left, right)
        if alike:
            return np.float32(0), signal_alone(b, left, right), np.float32(0), np.float32(0), 0
        error, signal, product, largest = sums(a, b, left, right)
        if not (np.isfinite(error) and np.isfinite(signal)):
            return careful(a, b, left, right)
        return error, signal, product, largest, 0

    @numba.njit
    def over_rows(a, b, row_error, row_signal):
        rows, width = a.shape
        a, b = a.reshape(-1), b.reshape(-1)
        whole = a.size * a.itemsize // 8 * 8 // a.itemsize
        own, other = a[:whole].view(np.int64), b[:whole].view(np.int64)
        error = signal = product = largest = 0.0
        odd = 0
        for r in range(rows):
            for left in range(r * width, (r + 1) * width, chunk):
                right = min(left + chunk, (r + 1) * width)
                e, s, p, m, w = of_chunk(a, b, own, other, left, right)
                row_error[r] += e
                row_signal[r] += s
                product += p
                largest = max(largest, m)
                odd += w
            error += row_error[r]
            signal += row_signal[r]
        return error, signal, product, largest, odd

    return over_rows


_bfloat16, _float32 = (_made(widen, _never, _plain, CHUNK) for widen in (_of_bfloat16, _of_float32))
_e4m3 = _made(_of_e4m3, _is_nan_e4m3, _looked_at_e4m3, CODES)


@numba.njit
def read(words):
    """The sum of int64 words: nothing but reading, to measure a bandwidth by."""
    total = np.int64(0)
    for i in range(words.shape[0]):
        total += words[i]
    return total
