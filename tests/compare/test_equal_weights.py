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


def a_token_again_and_again(seed: int, *, rows: int = 512, heads: int = 2, width: int = 32) -> dict:
    """Attention of one request whose states have settled: from row 48 on, one query, one key and one value."""
    d = Draw(seed, torch.bfloat16)
    q, keys, values = (d.act(rows, heads, width) for _ in range(3))
    for x in (q, keys, values):
        x[48:] = x[48]
    owner, visible = torch.zeros(rows, dtype=torch.int64), torch.arange(1, rows + 1)
    call = {"q": q, "keys": keys[None], "values": values[None], "owner": owner, "visible": visible}
    return call | {"scale": width**-0.5}


def flash(q, *, keys, values, owner, visible, scale, tile=16):
    """A fused kernel of one request: weights are rounded tile by tile, relative to the largest score so far."""
    s = torch.einsum("rhd,nhd->rhn", q.float(), keys[0].float()) * scale
    s = s.masked_fill(torch.arange(s.shape[-1]) >= visible[:, None, None], float("-inf"))
    most, total, y = s.new_full((*s.shape[:2], 1), -1e30), 0.0, 0.0
    for at in range(0, s.shape[-1], tile):
        part = s[..., at : at + tile]
        larger = torch.maximum(most, part.amax(-1, keepdim=True))
        p, shrunk, most = torch.exp(part - larger), torch.exp(most - larger), larger
        total = total * shrunk + p.sum(-1, keepdim=True)
        y = y * shrunk + torch.einsum("rhn,nhd->rhd", p.bfloat16().float(), values[0, at : at + tile].float())
    return (y / total).to(q.dtype)


def of_one_request(arguments: dict, y: torch.Tensor, seed: int):
    return judge_compute(Replay(CONTRACTS["mla.attention"], arguments), (y,), PROFILES["bf16"], seed=seed)[0]


@pytest.mark.parametrize("seed", [6, 9])
def test_equal_queries_err_alike(seed):
    """Catches 464 rows of one query that count as independent: a column's and a slope's limit were passed."""
    arguments = a_token_again_and_again(seed)
    j = of_one_request(arguments, flash(**arguments), seed)
    assert j.passed, j.message


def test_a_wrong_row_among_equal_queries_is_found():
    """Catches limits so wide that a prompt of one token shows nothing: a large row, a large head."""
    arguments = a_token_again_and_again(1)
    y = flash(**arguments)
    wrong = y.clone()
    wrong[300] *= 1.02
    j = of_one_request(arguments, wrong, 1)
    assert (j.passed, j.row) == (False, 300)
    y[:, 1] *= 1.02
    assert not of_one_request(arguments, y, 1).passed


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
