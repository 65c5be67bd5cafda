"""Every code of every number format against values worked out from the bit layout, one code at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import formats

F64 = torch.float64


def e2m1_by_bits(code: int) -> float:
    """Sign, two exponent bits of bias 1, one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if sign else value


def e4m3_by_bits(code: int) -> float:
    """Sign, four exponent bits of bias 7, three mantissa bits; all ones is NaN, there is no infinity."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def test_every_e2m1_code_decodes_to_its_bits_and_back():
    """Catches a wrong table, a lost sign of zero, and an encoder that does not invert the decoder."""
    codes = torch.arange(16, dtype=torch.uint8)
    values = formats.e2m1_decode(codes, F64)
    assert values.tolist() == [e2m1_by_bits(c) for c in range(16)]
    assert torch.signbit(values).tolist() == [c >= 8 for c in range(16)]
    assert torch.equal(formats.e2m1_encode(values), codes)


@settings(max_examples=200, deadline=None)
@given(st.floats(-10, 10, width=32))
def test_e2m1_encode_takes_the_nearest_value_and_the_even_code_on_a_tie(value):
    """Catches truncation, ties away from zero, and a missing saturation."""
    got = int(formats.e2m1_encode(torch.tensor([value], dtype=F64)))
    same_sign = [c for c in range(16) if (c >= 8) == (math.copysign(1, value) < 0)]
    distance = {c: abs(e2m1_by_bits(c) - value) for c in same_sign}
    nearest = [c for c in same_sign if distance[c] == min(distance.values())]
    assert got == (nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0))


def test_e2m1_ties_by_hand():
    """Catches half-up rounding: 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5 lie half-way."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0], dtype=F64)
    assert formats.e2m1_decode(formats.e2m1_encode(ties)).tolist() == [0, 1, 1, 2, 2, 4, 4, -4]
    with pytest.raises(ValueError, match="NaN"):
        formats.e2m1_encode(torch.tensor([math.nan]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_e8m0_scale_is_its_power_of_two(dtype):
    """Catches the float-bits shortcut, which turns code 0 (2^-127, a subnormal) into 0."""
    codes = torch.arange(255, dtype=torch.uint8)
    values = formats.e8m0_decode(codes, dtype).to(F64)
    assert values.tolist() == [math.ldexp(1.0, e - 127) for e in range(255)]
    assert torch.equal(formats.e8m0_encode(values), codes)


def test_e8m0_refuses_nan_and_what_is_no_power_of_two():
    """Catches 255 read as infinity, and float16, which cannot hold the range."""
    with pytest.raises(ValueError, match="255"):
        formats.e8m0_decode(torch.tensor([[3, 255]], dtype=torch.uint8))
    with pytest.raises(ValueError, match="float16"):
        formats.e8m0_decode(torch.tensor([3], dtype=torch.uint8), torch.float16)
    for bad in (3.0, 0.0, -2.0, math.inf, math.nan, 2.0**128, 2.0**-128):
        with pytest.raises(ValueError, match="power of two"):
            formats.e8m0_encode(torch.tensor([bad], dtype=F64))


def test_every_e4m3_code_decodes_to_its_bits_and_back():
    """Catches a wrong bias, wrong subnormals, and NaN codes read as 480."""
    codes = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    values = formats.e4m3_decode(codes, F64)
    for code, value in enumerate(values.tolist()):
        expected = e4m3_by_bits(code)
        assert value == expected or (math.isnan(value) and math.isnan(expected)), code
    numbers = ~torch.isnan(values)
    back = formats.e4m3_encode(values[numbers]).view(torch.uint8)
    assert torch.equal(back, codes[numbers])


def test_e4m3_encode_saturates_before_the_cast_and_keeps_nan():
    """Catches NaN or a wrap-around beyond 448, which differs between torch builds."""
    y = formats.e4m3_encode(torch.tensor([449.0, 1e30, -math.inf, math.inf, math.nan])).to(torch.float32)
    assert y[:4].tolist() == [448, 448, -448, 448]
    assert math.isnan(y[4])


def test_every_packed_byte_unpacks_low_nibble_first():
    """Catches swapped nibbles on all 256 byte values."""
    packed = torch.arange(256, dtype=torch.int64).to(torch.uint8)
    codes = formats.mxfp4_unpack(packed)
    assert codes.tolist() == [c for byte in range(256) for c in (byte & 15, byte >> 4)]
    assert torch.equal(formats.mxfp4_pack(codes), packed)


def test_every_mxfp4_code_at_every_scale_is_exact_in_float64():
    """Catches any error in any of the 16 x 255 weights, among them the ones beyond float32."""
    codes = torch.arange(32, dtype=torch.uint8) % 16
    packed = formats.mxfp4_pack(codes).expand(255, 16)
    scale = torch.arange(255, dtype=torch.uint8)[:, None]
    values = formats.mxfp4_decode(packed, scale, dtype=F64)
    for e in range(255):
        assert values[e].tolist() == [math.ldexp(e2m1_by_bits(c % 16), e - 127) for c in range(32)]


def test_mxfp4_decode_says_when_float32_cannot_hold_a_weight():
    """Catches a silent infinity: 6 x 2^126 is beyond float32, 6 x 2^125 is not."""
    packed = torch.full((1, 16), 0x77, dtype=torch.uint8)
    top = formats.mxfp4_decode(packed, torch.tensor([[252]], dtype=torch.uint8))
    assert top.unique().tolist() == [6 * 2.0**125]
    with pytest.raises(ValueError, match="float64"):
        formats.mxfp4_decode(packed, torch.tensor([[253]], dtype=torch.uint8))
    with pytest.raises(ValueError, match="one scale per 16 bytes"):
        formats.mxfp4_decode(packed, torch.zeros(1, 2, dtype=torch.uint8))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 15), min_size=32, max_size=32), st.integers(3, 250))
def test_mxfp4_encode_finds_the_value_again(codes, exponent):
    """Catches a wrong group exponent: what is representable must come back, value for value."""
    packed = formats.mxfp4_pack(torch.tensor([codes], dtype=torch.uint8))
    values = formats.mxfp4_decode(packed, torch.tensor([[exponent]], dtype=torch.uint8), dtype=F64)
    again = formats.mxfp4_decode(*formats.mxfp4_encode(values), dtype=F64)
    assert torch.equal(again, values)


def test_mxfp4_encode_by_hand():
    """Catches exponent floor(log2 amax) without the -2 of E2M1, and an unsaturated top (7 -> 6, not 8)."""
    values = torch.zeros(2, 32)
    values[0, 0], values[0, 1], values[0, 31] = 7.0, 0.3, -0.2
    values[1, 5] = 2.0**-20
    packed, scale = formats.mxfp4_encode(values)
    assert scale.flatten().tolist() == [127, 127 - 22]
    decoded = formats.mxfp4_decode(packed, scale)
    assert decoded[0, [0, 1, 31]].tolist() == [6.0, 0.5, -0.0]
    assert decoded[1, 5] == 2.0**-20
    with pytest.raises(ValueError, match="multiple of 32"):
        formats.mxfp4_encode(torch.zeros(1, 31))
    with pytest.raises(ValueError, match="finite"):
        formats.mxfp4_encode(torch.full((1, 32), math.inf))


def test_block_fp8_decode_multiplies_by_the_scale_of_its_block():
    """Catches division by weight_scale_inv, and blocks taken along the wrong axis, element by element."""
    rows, columns = 130, 257
    payload = (torch.arange(rows * columns) % 120).to(torch.uint8).reshape(rows, columns).view(torch.float8_e4m3fn)
    scale = torch.tensor([[2.0, 3.0, 5.0], [7.0, 11.0, 13.0]])
    y = formats.block_fp8_decode(payload, scale, dtype=F64)
    for n in (0, 127, 128, 129):
        for k in (0, 127, 128, 255, 256):
            code = int(payload.view(torch.uint8)[n, k])
            assert y[n, k] == e4m3_by_bits(code) * float(scale[n // 128, k // 128])
    with pytest.raises(ValueError, match="needs scales"):
        formats.block_fp8_decode(payload, scale[:1])


def test_block_fp8_encode_spans_the_range_and_keeps_zero_blocks():
    """Catches a scale of 0 (NaN payload) for a block of zeros and a block maximum that is not 448."""
    weight = torch.randn(200, 130, generator=torch.Generator().manual_seed(1))
    weight[128:, 128:] = 0
    payload, scale = formats.block_fp8_encode(weight)
    assert payload.shape == weight.shape
    assert scale.shape == (2, 2)
    assert scale[1, 1] == 1
    assert float(payload[:128, :128].to(torch.float32).abs().max()) == 448
    decoded = formats.block_fp8_decode(payload, scale)
    step = torch.maximum(
        weight.abs() * 2.0**-4, scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :130] * 2.0**-10
    )
    assert bool(((decoded - weight).abs() <= step * 1.001).all())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 2**31))
def test_int4_is_a_nibble_less_eight_times_the_scale_of_its_group(rows, groups, seed):
    """Catches codes read from the high bits down, codes as two's complement, groups of another size, another order."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(-(2**31), 2**31, (rows, 4 * groups), generator=generator).to(torch.int32)
    scale = torch.rand(rows, groups, generator=generator).to(torch.bfloat16)
    y = formats.int4_decode(packed, scale, dtype=F64)
    for row in range(rows):
        for column in range(32 * groups):
            word = int(packed[row, column // 8]) % 2**32
            code = word // 16 ** (column % 8) % 16
            assert float(y[row, column]) == (code - 8) * float(scale[row, column // 32])


def test_int4_encode_is_nearest_and_decodes_again():
    """Catches a scale that does not span the group, truncation, and words in another order than the decoder's."""
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(3))
    weight[2, 32:64] = 0
    packed, scale = formats.int4_encode(weight)
    assert (packed.dtype, packed.shape, scale.dtype, scale.shape) == (torch.int32, (6, 12), torch.bfloat16, (6, 3))
    decoded, step = formats.int4_decode(packed, scale), scale.float().repeat_interleave(32, 1)
    inside = weight.abs() <= 7 * step
    assert bool(((decoded - weight).abs() <= step / 2)[inside].all())
    assert bool(((decoded - weight).abs() <= step).all())  # the largest of a group may be cut by half a step more
    assert bool((decoded[2, 32:64] == 0).all())
    again, scale_again = formats.int4_encode(decoded)
    assert bool((formats.int4_decode(again, scale_again) - decoded).abs().max() <= step.max())
    with pytest.raises(ValueError, match="no multiple of 32"):
        formats.int4_encode(weight[:, :40])
    with pytest.raises(ValueError, match="need scales"):
        formats.int4_decode(packed, scale[:, :2])
