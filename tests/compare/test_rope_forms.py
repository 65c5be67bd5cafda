"""Guards the precision of rotary tables and angles: what is claimed, what is told, and a million positions."""

import pytest
import torch

from day0check.compare.compute import judge_compute
from day0check.compare.forms import beside_other_forms
from day0check.compare.replay import Replay
from day0check.compare.rounding import Rounder
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import generate
from day0check.contracts.profiles import PROFILES

CONTRACT = CONTRACTS["rope.apply"]
BF16, EAGER = PROFILES["bf16"], PROFILES["eager-bf16"]


def call(name, seed=0):
    hard = generate(CONTRACT, name, seed, torch.bfloat16)
    return Replay(CONTRACT, {"x": hard.args[0], **hard.kwargs})


def told(replay, y, profile):
    judged = judge_compute(replay, (y,), profile, seed=5)
    return beside_other_forms(judged, replay, (y,), profile, seed=5)[0]


@pytest.mark.parametrize("name", ["plain", "million_positions"])
def test_a_rounded_table_is_a_form_of_its_own(name):
    """Catches cos and sin in bfloat16 that pass for float32 tables, and an eager claim that refuses them."""
    replay = call(name)
    low = replay.wide(torch.float32)
    rounded = low.run(Rounder({"table": "bfloat16"}))[0].bfloat16()
    assert told(replay, rounded, EAGER).passed
    refused = told(replay, rounded, BF16)
    assert not refused.passed
    assert "consistent with the looser form 'rounded_table' of profile eager-bf16" in refused.message
    assert told(replay, low.run()[0].bfloat16(), EAGER).statistics["misfit_float32_table"] == 0.0


def test_angles_a_million_positions_out():
    """Catches an oracle whose float64 angle accuses every real implementation there, and one that is blind there: a
    position one too far turns the first pairs by a radian, a bfloat16 position turns all of them."""
    replay = call("million_positions")
    positions = replay.arguments["positions"]
    assert told(replay, replay.wide(torch.float32).run()[0].bfloat16(), BF16).passed
    for wrong in (positions + 1, positions.bfloat16().long()):
        y = replay.wide(torch.float32).changed(positions=wrong).run()[0].bfloat16()
        assert not told(replay, y, BF16).passed
        assert not told(replay, y, EAGER).passed
