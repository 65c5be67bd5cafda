"""Greedy choice and the seeded draw against Python integers and a running sum."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import sampling

MASK = 2**64 - 1


def splitmix(seed, position):
    """Output `position` of SplitMix64, stepped one by one with Python integers."""
    state = seed & MASK
    for _ in range(position + 1):
        state = (state + 0x9E3779B97F4A7C15) & MASK
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def sample(logits, temperature, seed=0, position=0):
    return int(
        sampling.sample(
            torch.tensor([logits], dtype=torch.float64), temperature=torch.tensor([temperature]),
            seed=torch.tensor([seed]), positions=torch.tensor([position]),
        )
    )  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 300))
def test_uniform_is_splitmix64(seed, position):
    """Catches an arithmetic shift of a negative word, a product that does not wrap, and the lower bits taken."""
    u = float(sampling.uniform(torch.tensor([seed]), positions=torch.tensor([position])))
    assert u == (splitmix(seed, position) >> 11) * 2.0**-53


def test_splitmix_published_first_outputs():
    """Catches a wrong constant in both forms, against the published first outputs of seed 1234567."""
    assert [splitmix(1234567, i) for i in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_greedy_takes_the_lowest_of_equal_logits():
    """Catches another tie rule, NaN taken for the largest, and all-negative logits."""
    assert sample([-3.0, -1.0, -1.0, -2.0], 0.0) == 1
    assert sample([math.nan, 0.0, 5.0, math.nan], 0.0) == 2
    assert sample([-math.inf, -math.inf], 0.0) == 0
    assert sample([-0.0, 0.0], 0.0) == 0


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.floats(0.1, 3), st.integers(0, 10**9), st.integers(0, 50))
def test_draw_inverts_the_running_sum(logits, temperature, seed, position):
    """Catches logits times temperature, a draw that starts from the end, and an index off by one."""
    temperature = float(torch.tensor(temperature, dtype=torch.float32))
    u = (splitmix(seed, position) >> 11) * 2.0**-53
    e = [math.exp((x - max(logits)) / temperature) for x in logits]
    total, running, expected = math.fsum(e), 0.0, len(e) - 1
    for i, p in enumerate(e):
        running += p
        if abs(running - u * total) < 1e-9 * total:
            return  # too near to an edge for two orders of summation to agree
        if running > u * total:
            expected = i
            break
    assert sample(logits, temperature, seed, position) == expected


def test_draws_follow_the_probabilities():
    """Catches a uniform number that is biased or repeats: 20,000 draws of a 4-token distribution, within 5 sigma."""
    n, p = 20_000, torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    ids = sampling.sample(
        p.log().expand(n, 4), temperature=torch.ones(n), seed=torch.full((n,), 7), positions=torch.arange(n)
    )
    counts = torch.bincount(ids, minlength=4).to(torch.float64)
    assert bool(((counts - n * p).abs() < 5 * (n * p * (1 - p)).sqrt()).all())


def test_draws_do_not_depend_on_the_batch():
    """Catches a generator whose state runs over the rows: any order, any batch, greedy rows between."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor([1.0, 0.0, 0.7, 2.0, 1.0, 0.0])
    seed, positions = torch.tensor([1, 1, 2, 3, 3, 4]), torch.tensor([0, 1, 0, 9, 10, 3])
    whole = sampling.sample(logits, temperature=temperature, seed=seed, positions=positions)
    order = torch.tensor([5, 2, 0, 4, 1, 3])
    again = sampling.sample(logits[order], temperature=temperature[order], seed=seed[order], positions=positions[order])
    assert torch.equal(again, whole[order])


def test_draw_never_takes_the_impossible():
    """Catches a token of probability zero at the ends of the vocabulary, and NaN or infinite logits."""
    for position in range(200):
        assert sample([-math.inf, 0.0, 0.0, -math.inf], 1.0, position=position) in (1, 2)
        assert sample([math.nan, 0.0, math.nan], 1.0, position=position) == 1
        assert sample([0.0, math.inf, 1.0], 1.0, position=position) == 1


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf])
def test_impossible_temperatures_are_refused(temperature):
    """Catches a negative temperature, which would prefer the worst token."""
    with pytest.raises(ValueError, match="temperature"):
        sample([0.0, 1.0], temperature)
