"""Guards rounding points that the profile does not claim: seen by their own change, however small beside the noise."""

import pytest
import torch

from day0check.compare.compute import judge_compute, unclaimed_points
from day0check.compare.judgement import beyond
from day0check.compare.replay import Replay
from day0check.compare.rounding import Rounder, round_nearest
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw
from day0check.contracts.profiles import PROFILES

BF16 = PROFILES["bf16"]
PROJECTED = ("slope", "direction", "error_", "rounding")


def attention(seed: int, scale: float = 0.06) -> Replay:
    d = Draw(seed, torch.bfloat16)
    keys = d.act(2, 96, 1, 96)
    return Replay(
        CONTRACTS["mla.attention"],
        {
            "q": d.act(96, 4, 96),
            "keys": keys,
            "values": keys[..., :64].contiguous(),
            "owner": torch.arange(96) * 2 // 96,
            "visible": 30 + torch.arange(96) % 60,
            "scale": scale,
        },
    )


def gated(seed: int) -> Replay:
    d = Draw(seed, torch.bfloat16)
    weights = {"gate": d.weight(96, 64), "up": d.weight(96, 64), "down": d.weight(64, 96)}
    return Replay(CONTRACTS["mlp.dense"], {"x": d.act(96, 64), **weights, "activation": "silu"})


def result(replay: Replay, *rounded: str) -> torch.Tensor:
    """A float32 implementation that rounds to nearest at what bf16 claims, and at the points given."""
    points = {**BF16.points_of(replay.contract.name), **dict.fromkeys(rounded, "bfloat16")}
    y = replay.wide(torch.float32).run(Rounder(points, leave=("out",)))[0]
    return round_nearest(y, "bfloat16").bfloat16()


@pytest.mark.parametrize("seed", range(5))
def test_scores_in_bfloat16_are_seen_where_they_make_less_error_than_the_weights_may(seed):
    """Catches an unclaimed rounding that hides in the noise of claimed ones: ratios, slopes and |z| all pass."""
    replay = attention(seed)
    judged = judge_compute(replay, (result(replay, "s"),), BF16, seed=seed)[0]
    others = {k: v for k, v in judged.limits.items() if not k.startswith(PROJECTED)}
    assert not beyond(judged.statistics, others)
    assert judged.failing == "rounding_s"
    assert "rounded at 's', unclaimed" in judged.message


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("make", [attention, gated])
def test_what_is_claimed_holds_no_unclaimed_rounding(make, seed):
    """Catches a direction that claimed roundings lie in: healthy results would raise an alarm."""
    replay = make(seed)
    assert unclaimed_points(replay.contract, BF16)
    assert judge_compute(replay, (result(replay),), BF16, seed=seed)[0].passed


@pytest.mark.parametrize("point", ["gate", "up"])
def test_each_point_that_another_form_rounds_is_named(point):
    """Catches a point that is never asked for, and the words of its neighbour."""
    replay = gated(0)
    judged = judge_compute(replay, (result(replay, point),), BF16, seed=0)[0]
    assert not judged.passed
    told = {k: v for k, v in judged.statistics.items() if k.startswith("rounding") and v > judged.limits[k]}
    assert set(told) == {f"rounding_{point}"}


def test_points_that_are_claimed_or_feed_back_are_not_asked_for():
    """Catches a direction of a rounding that the profile allows, and float32 profiles that ask for bfloat16."""
    assert unclaimed_points(CONTRACTS["mla.attention"], BF16) == ("s",)
    assert unclaimed_points(CONTRACTS["mla.attention"], PROFILES["eager-bf16"]) == ()
    assert unclaimed_points(CONTRACTS["mla.attention"], PROFILES["fp32"]) == ()
    assert not {"operands", "state"} & set(unclaimed_points(CONTRACTS["kda.attention"], BF16))
