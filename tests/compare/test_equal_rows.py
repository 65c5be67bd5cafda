"""Equal rows are rounded alike by the replicates of the net, and only equal ones."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.compare.equal_rows import EqualRowsAlike, distinct_rows, quantised_alike
from day0check.compare.rounding import Rounder


@given(seed=st.integers(0, 10_000), kinds=st.integers(1, 6), rows=st.integers(1, 30), wide=st.booleans())
@settings(max_examples=25, deadline=None)
def test_rows_are_told_apart_by_their_content(seed, kinds, rows, wide):
    """Catches a digest that takes different rows for one, or one content for two."""
    g = torch.Generator().manual_seed(seed)
    pool = torch.randn(kinds, 7, generator=g, dtype=torch.float64 if wide else torch.float32)
    which = torch.randint(0, kinds, (rows,), generator=g)
    first, at = distinct_rows(pool[which])
    if first is None:
        assert len(which.unique()) == rows
        assert torch.equal(at, torch.arange(rows))
    else:
        assert torch.equal(pool[which][first][at], pool[which])
        assert len(first) == len(which.unique())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_swapped_and_negated_columns_are_other_rows(dtype):
    """Catches a digest that does not see where in a row a value stands, or its sign."""
    x = torch.tensor([[1.0, 2.0, 3.0], [2.0, 1.0, 3.0], [-1.0, 2.0, 3.0], [-1.0, -2.0, 3.0]], dtype=dtype)
    assert distinct_rows(x)[0] is None


def test_a_mean_over_equal_rows_keeps_its_rounding_error():
    """Catches replicates that average the roundings of one token away: attention over a prompt of few different bytes
    was 1.11 times its noise on healthy code (text/code on tiny-glm-5 under fp8-cache)."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1, 64, generator=g, dtype=torch.float64).expand(400, -1).contiguous()
    points, draw = {"out": "bfloat16"}, torch.Generator().manual_seed(2)
    alike = EqualRowsAlike(points, "random", draw)("out", x)
    apart = Rounder(points, "random", draw)("out", x)
    assert torch.equal(alike, alike[:1].expand_as(alike))
    assert (alike - x).mean(0).abs().mean() > 5 * (apart - x).mean(0).abs().mean()
    codes = quantised_alike(x, "float8_e4m3fn/128", draw)
    assert torch.equal(codes, codes[:1].expand_as(codes))


def test_different_rows_are_rounded_as_before():
    """Catches draws that are shared between rows that differ, which would make their errors one."""
    x = torch.randn(50, 16, generator=torch.Generator().manual_seed(3))
    points = {"out": "bfloat16"}
    alike = EqualRowsAlike(points, "random", torch.Generator().manual_seed(4))("out", x)
    apart = Rounder(points, "random", torch.Generator().manual_seed(4))("out", x)
    assert torch.equal(alike, apart)
