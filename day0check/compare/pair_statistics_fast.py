"""The compiled loops of `pair_statistics`: integer views of stored formats, widened in registers. Needs numba."""

from __future__ import annotations

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic

CHUNK = 4096  # elements whose sums are kept in float32
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
def _as_bits(typing, value):
    """The 32 bits of a float32."""

    def generate(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return numba.int32(numba.float32), generate


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


@numba.njit
def _holds_nan_e4m3(codes):
    """Eight codes at a time: adding one to the seven low bits carries into the eighth where all seven are set."""
    whole = codes.shape[0] // 8 * 8
    words = codes[:whole].view(np.int64)
    found = np.int64(0)
    for i in range(words.shape[0]):
        found |= (words[i] & 0x7F7F7F7F7F7F7F7F) + 0x0101010101010101
    rest = False
    for i in range(whole, codes.shape[0]):
        rest |= _is_nan_e4m3(codes[i])
    return rest or (found & np.int64(-0x7F7F7F7F7F7F7F80)) != 0


def _made(widen, is_nan, holds_nan):
    """The loop over rows of a pair whose codes `widen` turns into float32, save those that `is_nan` knows; `holds_nan`
    says whether a chunk has one."""

    @numba.njit(fastmath={"reassoc", "contract", "nsz"}, error_model="numpy")
    def sums(a, b):
        """Of a chunk: sums of e^2, o^2 and e o, the largest |e|. A maximum of integers is taken many at a time, one of
        floats is not."""
        error, signal, product = np.float32(0), np.float32(0), np.float32(0)
        largest = np.int32(0)
        for i in range(a.shape[0]):
            o = widen(b[i])
            e = widen(a[i]) - o
            error += e * e
            signal += o * o
            product += e * o
            largest = max(largest, _as_bits(e) & np.int32(0x7FFFFFFF))
        return error, signal, product, _as_float(largest)

    @numba.njit
    def careful(a, b):
        """The same without what is no finite number, and how many of those have other bits."""
        error, signal, product, largest = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        odd = 0
        for i in range(a.shape[0]):
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
    def over_rows(a, b, row_error, row_signal):
        rows, width = a.shape
        a, b = a.reshape(-1), b.reshape(-1)
        error = signal = product = largest = 0.0
        odd = 0
        for r in range(rows):
            for left in range(r * width, (r + 1) * width, CHUNK):
                right = min(left + CHUNK, (r + 1) * width)
                own, other = a[left:right], b[left:right]
                e, s, p, m = sums(own, other)
                w = 0
                if not (np.isfinite(e) and np.isfinite(s)) or holds_nan(own) or holds_nan(other):
                    e, s, p, m, w = careful(own, other)
                row_error[r] += e
                row_signal[r] += s
                product += p
                largest = max(largest, m)
                odd += w
            error += row_error[r]
            signal += row_signal[r]
        return error, signal, product, largest, odd

    return over_rows


_bfloat16, _float32 = (_made(widen, _never, _never) for widen in (_of_bfloat16, _of_float32))
_e4m3 = _made(_of_e4m3, _is_nan_e4m3, _holds_nan_e4m3)


@numba.njit
def read(words):
    """The sum of int64 words: nothing but reading, to measure a bandwidth by."""
    total = np.int64(0)
    for i in range(words.shape[0]):
        total += words[i]
    return total
