"""Guards exact rounding: every noise figure stands on it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.compare.rounding import FORMATS, Rounder, random_variance, round_nearest, round_random, ulp

TORCH = {name: getattr(torch, name) for name in FORMATS}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@given(values=st.lists(st.floats(min_value=-1e6, max_value=1e6, width=32), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_nearest_equals_the_cast_of_torch(dtype, values):
    """Catches a wrong ulp, wrong ties, wrong subnormals or a missing overflow."""
    x = torch.tensor(values, dtype=torch.float64)
    expected = x.to(torch.float32).to(TORCH[dtype]).to(torch.float64)
    assert torch.equal(round_nearest(x, dtype), expected)
    assert torch.equal(round_nearest(x.float(), dtype), expected.float())


def test_nearest_of_every_bfloat16_midpoint_and_special():
    """Catches ties that do not go to even, and NaN or infinities that do not survive."""
    bits = torch.arange(0, 0x7F80, dtype=torch.int16)
    low = bits.view(torch.bfloat16).double()
    high = torch.cat([low[1:], torch.tensor([2.0**128], dtype=torch.float64)])
    even = torch.where(bits % 2 == 0, low, high)
    even[-1] = float("inf")
    assert torch.equal(round_nearest((low + high) / 2, "bfloat16"), even)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0], dtype=torch.float64)
    out = round_nearest(special, "bfloat16")
    assert torch.isnan(out[0])
    assert out[1:3].tolist() == [float("inf"), -float("inf")]
    assert torch.signbit(out[3])


def test_every_e4m3_code_and_midpoint():
    """Catches a wrong subnormal step or range of E4M3."""
    codes = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert torch.equal(round_nearest(codes, "float8_e4m3fn"), codes)
    middle = (codes[:-1] + codes[1:]) / 2
    assert torch.equal(round_nearest(middle, "float8_e4m3fn"), middle.float().to(torch.float8_e4m3fn).double())
    assert round_nearest(torch.tensor([1e4, -1e4], dtype=torch.float64), "float8_e4m3fn").tolist() == [448.0, -448.0]


@pytest.mark.parametrize("dtype", sorted(FORMATS))
def test_random_rounding_is_unbiased_with_the_stated_variance(dtype):
    """Catches a biased draw and a variance that does not belong to it."""
    generator = torch.Generator().manual_seed(3)
    x = torch.full((200_000,), 1.3, dtype=torch.float64)
    y = round_random(x, dtype, generator)
    step = ulp(x, dtype)[0]
    assert len(((y - x) / step).unique()) == 2
    assert abs((y - x).mean() / step) < 0.01
    assert torch.isclose((y - x).square().mean(), random_variance(x, dtype)[0], rtol=0.02)
    assert random_variance(round_nearest(x, dtype)[:1], dtype).item() == 0


def test_rounder_rounds_the_named_points_only_and_repeats_with_its_seed():
    """Catches a rounder that ignores `leave`, rounds unnamed points, or is not reproducible."""
    x = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rounder = Rounder({"p": "bfloat16", "out": "bfloat16"}, "nearest", leave=("out",))
    assert torch.equal(rounder("p", x), x.bfloat16().double())
    assert torch.equal(rounder("out", x), x)
    assert torch.equal(rounder("other", x), x)
    draws = [Rounder({"p": "bfloat16"}, "random", torch.Generator().manual_seed(seed))("p", x) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
