"""All statistics of a pair of stored tensors in one pass, by torch and by the compiled loop where it is installed."""

import importlib.util
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.compare import pair_statistics_codes as of_codes
from day0check.compare import pair_statistics_torch as torch_alone
from day0check.compare.pair_statistics import FORMATS, compiled, joined, pair_statistics

HAS_NUMBA = importlib.util.find_spec("numba") is not None
WAYS = [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_NUMBA, reason="the extra `fast` is not installed"))]


def pair(dtype, shape=(7, 300), seed=0, off=0.01):
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-5, 6, shape, generator=generator))
    return (truth * (1 + off * torch.randn(shape, generator=generator))).to(dtype), truth.to(dtype)


def slowly(a, b):
    x, o = a.double(), b.double()
    return x - o, o


@pytest.mark.parametrize("fast", WAYS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(7, 300), (1, 9000), (300, 3), (5,), (2, 3, 70)])
def test_every_statistic_is_that_of_float64(dtype, shape, fast):
    """Catches a code that is widened wrongly, a row or a block at the end that is left out."""
    a, b = pair(dtype, shape)
    found = pair_statistics(a, b, fast=fast)
    e, o = slowly(a, b)
    rows = (shape[0], -1)
    assert found.elements == a.numel()
    assert found.error == pytest.approx(float(e.square().sum()), rel=1e-5)
    assert found.signal == pytest.approx(float(o.square().sum()), rel=1e-5)
    assert found.product == pytest.approx(float((e * o).sum()), rel=1e-3, abs=1e-5 * found.signal)
    assert found.largest == float(e.abs().max())
    torch.testing.assert_close(found.row_error, e.reshape(rows).square().sum(1), rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(found.row_signal, o.reshape(rows).square().sum(1), rtol=1e-5, atol=1e-12)
    assert found.odd == 0


@pytest.mark.parametrize("fast", WAYS)
def test_every_code_of_e4m3_is_read_as_torch_reads_it(fast):
    """Catches a subnormal, a sign or the NaN of the format that bits moved by hand get wrong."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(1, -1)
    zero = torch.zeros(1, 256).to(torch.float8_e4m3fn)
    values = codes.float().nan_to_num(nan=0.0).double()
    found = pair_statistics(codes, zero, fast=fast)
    assert found.error == pytest.approx(float(values.square().sum()), rel=1e-6)
    assert (found.largest, found.odd) == (448.0, 2)
    for code in range(256):
        one = pair_statistics(codes[:, code : code + 1], zero[:, :1], fast=fast)
        assert one.largest == abs(float(values[0, code])), code


@pytest.mark.parametrize("fast", WAYS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_what_is_no_number_is_counted_where_its_bits_differ_and_nowhere_else(dtype, fast):
    """Catches a NaN that makes a sum NaN, or that hides between two sums."""
    a, b = pair(dtype, (6, 5000))
    a[2, 17] = torch.nan
    a[3, 4999] = b[3, 4999] = torch.nan
    if dtype != torch.float8_e4m3fn:
        a[4, 0] = torch.inf
        b[5, 1] = -torch.inf
    found = pair_statistics(a, b, fast=fast)
    x, o = a.double(), b.double()
    finite = torch.isfinite(x) & torch.isfinite(o)
    e = torch.where(finite, x - o, 0.0)
    assert found.odd == (1 if dtype == torch.float8_e4m3fn else 3)
    assert found.error == pytest.approx(float(e.square().sum()), rel=1e-5)
    assert found.largest == float(e.abs().max())


@given(st.lists(st.integers(0, 9), max_size=4), st.sampled_from(FORMATS), st.integers(0, 10))
@settings(max_examples=25, deadline=None)
def test_slices_joined_are_the_whole(cuts, dtype, seed):
    """Catches statistics of a tensor that is read a slice at a time and loses one."""
    a, b = pair(dtype, (9, 40), seed)
    edges = sorted({0, 9, *cuts})
    whole, parts = pair_statistics(a, b), joined(pair_statistics(a[i:j], b[i:j]) for i, j in pairwise(edges))
    assert (parts.elements, parts.largest, parts.odd) == (whole.elements, whole.largest, whole.odd)
    assert parts.error == pytest.approx(whole.error, rel=1e-5)
    assert torch.allclose(parts.row_signal, whole.row_signal, rtol=1e-5)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("shape", [(33, 24), (33, 150), (2, 7)])
def test_memory_is_bounded_by_a_block(dtype, shape, monkeypatch):
    """Catches a comparison that widens a whole tensor, and a block, a piece of a row or the last of them left out."""
    monkeypatch.setattr(torch_alone, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(of_codes, "BLOCK_CODES", 64)
    monkeypatch.setattr(of_codes, "WORDS_KEPT", 3)
    a, b = pair(dtype, shape)
    made = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: made.append(size) or empty(*size, **kw))
    found = pair_statistics(a, b, fast=False)
    e = a.double() - b.double()
    torch.testing.assert_close(found.row_error, e.square().sum(1), rtol=1e-5, atol=1e-12)
    torch.testing.assert_close(found.row_signal, b.double().square().sum(1), rtol=1e-5, atol=1e-12)
    assert found.largest == float(e.abs().max())
    assert made
    assert max(math.prod(size[0]) for size in made) <= 2 * 64 * torch.get_num_threads()


@pytest.mark.parametrize("factor", [1e-25, 1e25])
def test_squares_that_leave_float32_are_found_all_the_same(factor):
    """Catches an error of which only the square is nothing, and a sum that is infinite."""
    a, b = (t * factor for t in pair(torch.float32, (4, 100)))
    found, (e, o) = pair_statistics(a, b, fast=False), slowly(a, b)
    assert found.largest == float((a - b).abs().max()) > 0
    assert found.error == pytest.approx(float(e.square().sum()), rel=1e-5, abs=0)
    assert found.signal == pytest.approx(float(o.square().sum()), rel=1e-5, abs=0)
    assert found.odd == 0


@pytest.mark.parametrize("fast", WAYS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_of_equal_tensors_only_the_signal_is_left(dtype, fast):
    """Catches a short way for chunks of equal bytes that forgets the oracle, or NaN on both sides."""
    a, _ = pair(dtype, (5, 3003))
    a[3, 1000] = torch.nan
    found = pair_statistics(a, a.clone(), fast=fast)
    o = torch.nan_to_num(a.double(), nan=0.0)
    assert (found.error, found.product, found.largest, found.odd) == (0.0, 0.0, 0.0, 0)
    torch.testing.assert_close(found.row_signal, o.square().sum(1), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("fast", WAYS)
@pytest.mark.parametrize("at", [(0, 0), (1, 1028), (2, 2050), (4, 3002)])
def test_one_code_that_differs_is_found_wherever_it_lies(at, fast):
    """Catches the ends of a chunk that are no whole word of eight codes."""
    a, b = torch.ones(2, 5, 3003).to(torch.float8_e4m3fn)
    a[at] = 2.0
    found = pair_statistics(a, b, fast=fast)
    assert (found.error, found.product, found.largest) == (1.0, 1.0, 1.0)
    assert found.row_error.nonzero().flatten().tolist() == [at[0]]


@pytest.mark.parametrize("fast", WAYS)
@pytest.mark.parametrize("side", [0, 1])
def test_one_code_that_is_no_number_is_odd_where_all_else_is_equal(side, fast):
    """Catches a NaN of one side that is looked for on the other alone where few codes differ."""
    codes = torch.ones(2, 5, 3008).to(torch.float8_e4m3fn)
    codes[0, 1, 7] = 2.0
    codes[side, 3, 1001] = torch.nan
    found = pair_statistics(*codes, fast=fast)
    assert (found.error, found.product, found.largest, found.odd) == (1.0, 1.0, 1.0, 1)
    assert found.row_signal.tolist() == [3008.0, 3008.0, 3008.0, 3007.0, 3008.0]


@given(
    st.integers(1, 40),
    st.integers(1, 60),
    st.sampled_from([0.0, 0.003, 0.1, 1.0]),
    st.integers(0, 9),
    st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_codes_by_torch_whatever_their_number_their_place_and_how_many_differ(rows, width, share, offset, seed):
    """Catches a code at an odd place, at the end of a word, in memory that begins inside one, or in the wrong row, and
    the way for few codes that differ where it says other things than the way for many."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (2, offset + rows * width), generator=draw, dtype=torch.uint8)
    codes[0] = torch.where(torch.rand(codes.shape[1], generator=draw) < share, codes[0], codes[1])
    if seed % 4:
        codes = torch.where(codes & 0x7F == 0x7F, 0x30, codes)  # no NaN
    a, b = (c.view(torch.float8_e4m3fn)[offset:].view(rows, width) for c in codes)
    found = pair_statistics(a, b, fast=False)
    x, o = a.double(), b.double()
    finite = torch.isfinite(x) & torch.isfinite(o)
    e, o = torch.where(finite, x - o, 0.0), torch.where(finite, o, 0.0)
    torch.testing.assert_close(found.row_error, e.square().sum(1), rtol=1e-5, atol=0)
    torch.testing.assert_close(found.row_signal, o.square().sum(1), rtol=1e-5, atol=0)
    assert found.product == pytest.approx(float((e * o).sum()), rel=1e-3, abs=1e-5 * found.signal)
    assert found.largest == float(e.abs().max())
    assert found.odd == int((~finite & (a.view(torch.uint8) != b.view(torch.uint8))).sum())


@pytest.mark.parametrize("width", [32, 33])
@pytest.mark.parametrize("share", [0.02, 1.0])
def test_zeros_of_either_sign_have_no_error_and_the_least_number_has_one(width, share):
    """Catches a sign that is taken for a bit of the number, and a subnormal that becomes nothing, on both ways."""
    codes = torch.zeros(2, 40 * width, dtype=torch.uint8)
    codes[0, : int(share * codes.shape[1])] = 0x80
    a, b = (c.view(torch.float8_e4m3fn).view(40, width) for c in codes)
    found = pair_statistics(a, b, fast=False)
    assert (found.error, found.signal, found.largest, found.odd) == (0.0, 0.0, 0.0, 0)
    codes[0, 5], codes[1, 5], codes[1, width + 4] = 0x81, 0x01, 0x82
    found, square = pair_statistics(a, b, fast=False), 2.0**-18
    assert (found.error, found.signal, found.product, found.largest) == (8 * square, 5 * square, -6 * square, 2.0**-8)
    assert found.row_error[:2].tolist() == [4 * square, 4 * square]


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_threads_change_no_statistic(dtype):
    """Catches blocks of several threads that are cut otherwise than they are read."""
    a, b = pair(dtype, (70, 3000))
    one = pair_statistics(a, b, fast=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        more = pair_statistics(a, b, fast=False)
    finally:
        torch.set_num_threads(threads)
    torch.testing.assert_close(more.row_error, one.row_error, rtol=1e-5, atol=0)
    torch.testing.assert_close(more.row_signal, one.row_signal, rtol=1e-5, atol=0)
    assert (more.largest, more.odd) == (one.largest, one.odd)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("width", [100, 4096, 2**14, 2**19 + 5])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_signal_of_long_rows_keeps_its_digits(dtype, width, threads):
    """Catches one float32 sum over a whole row, each step of which rounds the same way where all elements are alike."""
    a, b = (torch.full((3, width), value).to(dtype) for value in (1.3, 1.1))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = pair_statistics(a, b, fast=False)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found.row_signal, b.double().square().sum(1), rtol=2e-6, atol=0)
    torch.testing.assert_close(found.row_error, (a.double() - b.double()).square().sum(1), rtol=2e-6, atol=0)


@pytest.mark.parametrize("fast", WAYS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("width", [24, 300, 20000])
def test_neither_tensor_is_written_to(dtype, width, fast):
    """Catches squares that are written over the oracle where it needs no widening."""
    tensors = pair(dtype, (4, width))
    before = [t.clone() for t in tensors]
    pair_statistics(*tensors, fast=fast)
    assert all(torch.equal(t.view(torch.uint8), b.view(torch.uint8)) for t, b in zip(tensors, before, strict=True))


def test_pairs_that_are_none_are_refused():
    with pytest.raises(ValueError, match="has no statistics"):
        pair_statistics(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(ValueError, match="no compiled loop"):
        pair_statistics(torch.zeros(2, 3).half(), torch.zeros(2, 3).half(), fast=True)
    assert pair_statistics(torch.zeros(2, 3).half(), torch.ones(2, 3)).error == pytest.approx(6)
    assert (compiled() is not None) == HAS_NUMBA
