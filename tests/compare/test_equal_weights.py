"""Attention to one key again and again: its weights are equal and round alike, so that their errors add up."""

import pytest
import torch

from day0check.accelerated.ops import TABLE
from day0check.compare.compute import judge_compute
from day0check.compare.equal_weights import largest_alike
from day0check.compare.replay import Replay
from day0check.compare.rounding import round_alike, round_nearest, ulp
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw
from day0check.contracts.profiles import PROFILES

KEYS, WIDTH = 64, 32


def one_key_again(seed: int, again: int, rows: int = 48, heads: int = 4) -> dict:
    """Attention of rows to keys of their own, the last `again` of which are one key."""
    d = Draw(seed, torch.bfloat16)
    q, keys = d.act(rows, heads, 48), d.act(rows, KEYS, 48)
    keys[:, KEYS - again :] = keys[:, -1:]
    valid = torch.ones(rows, KEYS, dtype=torch.bool)
    return {"q": q, "keys": keys, "valid": valid, "value_width": WIDTH, "scale": 0.15}


def attended(arguments: dict) -> torch.Tensor:
    return TABLE["dsa.attention"](arguments["q"], **{k: v for k, v in arguments.items() if k != "q"})


def judged(arguments: dict, y: torch.Tensor, *, seed: int, profile: str = "bf16"):
    return judge_compute(Replay(CONTRACTS["dsa.attention"], arguments), (y,), PROFILES[profile], seed=seed)[0]


@pytest.mark.parametrize(
    ("again", "profile", "seed"),
    [(32, "bf16", 19), (60, "bf16", 4), (60, "bf16", 13), (60, "bf16", 15), (60, "eager-bf16", 4)],
)
def test_a_healthy_kernel_raises_no_alarm(again, profile, seed):
    """Catches weights whose errors are taken for independent: these five of 160 such calls raised an alarm then."""
    arguments = one_key_again(seed, again)
    j = judged(arguments, attended(arguments), seed=seed, profile=profile)
    assert j.passed, j.message


@pytest.mark.parametrize("again", [0, 60])
def test_what_is_wrong_is_still_found(again):
    """Catches a noise so wide that such rows are judged no more: a head 1 % too large, a value that is lost."""
    arguments = one_key_again(3, again)
    y = attended(arguments)
    larger = y.clone()
    larger[:, 2] *= 1.01
    assert not judged(arguments, larger, seed=3).passed
    lost = arguments | {"valid": arguments["valid"].clone()}
    lost["valid"][7, -1] = False
    y[7] = attended(lost)[7]
    j = judged(arguments, y, seed=3)
    assert (j.passed, j.row) == (False, 7)


def test_equal_values_round_alike_and_the_mean_is_kept():
    """Catches draws by place, a draw shared by all values, and a rounding that has a bias."""
    x = torch.rand(4096, dtype=torch.float64).repeat(2)
    mean = torch.zeros_like(x)
    for seed in range(64):
        y = round_alike(x, "bfloat16", torch.Generator().manual_seed(seed))
        assert torch.equal(y[:4096], y[4096:])
        assert torch.equal(round_nearest(y, "bfloat16"), y)
        mean += y / 64
    error = (mean - x) / ulp(x, "bfloat16")
    assert error.abs().max() < 0.35  # a rounding of 64 has a standard deviation of at most 1/16
    assert error[:4096].mean().abs() < 0.005


def test_only_a_group_that_outweighs_its_row_counts():
    """Catches a group of one, and one that is found among weights that differ."""
    ones = torch.full((1, 8), 0.11, dtype=torch.float64)
    apart = torch.linspace(0.1, 0.2, 8, dtype=torch.float64)[None]
    some = torch.cat([apart[:, :4], ones[:, :4]], 1)
    variance = torch.full_like(ones, 4.0)
    assert torch.equal(largest_alike(ones, variance, "bfloat16"), torch.full_like(ones, 2.0))
    assert not largest_alike(apart, variance, "bfloat16").any()
    assert largest_alike(some, variance, "bfloat16").tolist() == [[0, 0, 0, 0, 2, 2, 2, 2]]
