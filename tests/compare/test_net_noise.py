"""The noise map of the net and the ratio over rows: what a replicate and a nearest rounding give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.compare.logits import compare_logits, given_up_noises
from day0check.compare.net_measures import WHOLE_LIMIT, typical_ratio, whole_limit
from day0check.compare.net_noise import effective_degrees, noise_map, row_errors


def errors(seed: int, rows: int, columns: int, *, members: int = 3, factor: float = 1.0) -> tuple[torch.Tensor, ...]:
    """oracle and members' values: errors with uneven rows and one loud column, the first member's times `factor`."""
    generator = torch.Generator().manual_seed(seed)
    row = torch.exp(torch.randn(rows, 1, generator=generator, dtype=torch.float64)) * 1e-3
    column = torch.ones(1, columns, dtype=torch.float64)
    column[0, 0] = 30.0
    noise = torch.randn(members, rows, columns, generator=generator, dtype=torch.float64) * row * column
    noise[0] *= factor
    oracle = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return oracle, oracle + noise


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 200), columns=st.sampled_from([8, 64]))
def test_a_fellow_of_the_replicates_is_within_the_limit(seed, rows, columns):
    """Would catch limits that random rounding itself exceeds, with one row as with many."""
    oracle, values = errors(seed, rows, columns)
    found = row_errors(oracle, values[0], values[1:])
    assert typical_ratio(found.z, found.replicate_z) <= whole_limit(found.replicate_z)
    assert bool(found.finite.all())


@pytest.mark.parametrize("factor", [0.7, 1.0, 1.5])
def test_the_ratio_is_the_factor_of_the_error(factor):
    """Would catch a ratio that loud columns or loud rows decide."""
    oracle, values = errors(1, 800, 64, factor=factor)
    found = row_errors(oracle, values[0], values[1:])
    assert typical_ratio(found.z, found.replicate_z) == pytest.approx(factor, rel=0.03)
    assert whole_limit(found.replicate_z) == WHOLE_LIMIT
    one = values[0].clone()
    one[5] += 100
    lost = row_errors(oracle, one, values[1:])
    assert typical_ratio(lost.z, lost.replicate_z) == pytest.approx(factor, rel=0.05)
    assert float(lost.z[5]) > 1e4


def test_noise_map_finds_rows_and_columns():
    """Would catch a map that gives a loud column the noise of the others."""
    oracle, values = errors(2, 400, 32, members=4)
    variance = noise_map((values - oracle).square(), oracle)
    assert float((variance[:, 0] / variance[:, 1]).mean()) == pytest.approx(900, rel=0.2)


def test_no_noise_is_no_licence():
    """Would catch an exact tap in which any error is allowed, and exact equality that counts as an error."""
    oracle = torch.randn(20, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).bfloat16().double()
    replicates = torch.stack([oracle, oracle])
    same = row_errors(oracle, oracle.bfloat16(), replicates)
    assert typical_ratio(same.z, same.replicate_z) == 0.0
    off = row_errors(oracle, oracle * (1 + 2.0**-8), replicates)
    assert typical_ratio(off.z, off.replicate_z) > 100
    assert float(off.z.min()) > 30**2


def test_effective_degrees():
    """Would catch heavy rows being taken for many independent errors."""
    generator = torch.Generator().manual_seed(3)
    for degrees in (4, 40):
        squares = torch.randn(2, 3000, degrees, generator=generator).double().square().mean(-1)
        assert effective_degrees(squares) == pytest.approx(degrees, rel=0.15)


def test_tokens_in_noises_of_their_own_difference():
    """Would catch one noise for all tokens: a loud token may flip, a quiet one may not."""
    generator = torch.Generator().manual_seed(4)
    oracle = torch.zeros(50, 6, dtype=torch.float64)
    oracle[:, 0], oracle[:, 1], oracle[:, 2] = 1.0, 0.9, 0.9
    loud = torch.tensor([0.001, 0.1, 0.001, 0.001, 0.001, 0.001], dtype=torch.float64)
    replicates = oracle + loud * torch.randn(3, 50, 6, generator=generator, dtype=torch.float64)
    one = torch.ones(50, dtype=torch.int64)
    assert float(given_up_noises(oracle, one, replicates).median()) < 2
    assert float(given_up_noises(oracle, 2 * one, replicates).min()) > 8
    assert given_up_noises(oracle, 0 * one, replicates).tolist() == [0.0] * 50
    assert bool(given_up_noises(oracle, 6 * one, replicates).isinf().all())
    candidate = oracle.clone()
    candidate[7, 3] = float("nan")
    rows = compare_logits(oracle, candidate, replicates)
    assert rows.agrees.tolist() == [i != 7 for i in range(50)]
    assert float(rows.margin[7]) == float("inf")
