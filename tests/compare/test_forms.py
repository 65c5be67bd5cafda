"""Guards the search for the form that a result is consistent with."""

import torch

from day0check.compare.compute import judge_compute
from day0check.compare.forms import beside_other_forms
from day0check.compare.replay import Replay
from day0check.compare.rounding import Rounder
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw
from day0check.contracts.profiles import PROFILES, with_form

BF16, EAGER = PROFILES["bf16"], PROFILES["eager-bf16"]


def told(replay, y, profile):
    judged = judge_compute(replay, (y,), profile, seed=3)
    return beside_other_forms(judged, replay, (y,), profile, seed=3)[0]


def mlp(seed, factor=1.0):
    d = Draw(seed, torch.bfloat16)
    weights = {"gate": d.weight(160, 64), "up": d.weight(160, 64), "down": d.weight(64, 160)}
    replay = Replay(CONTRACTS["mlp.dense"], {"x": d.act(96, 64), **weights, "activation": "silu"})

    def candidate(profile):
        low = replay.wide(torch.float32).changed(down=weights["down"].float() * factor)
        return low.run(Rounder(profile.points_of("mlp.dense"), leave=("out",)))[0].bfloat16()

    return replay, candidate


def dense(d, rows=80):
    keys = d.act(1, 64, 1, 48)
    arguments = {"q": d.act(rows, 4, 48), "keys": keys, "values": keys[..., :32].contiguous(), "scale": 0.15}
    arguments |= {"owner": torch.zeros(rows, dtype=torch.int64), "visible": torch.full((rows,), 60)}
    return Replay(CONTRACTS["mla.attention"], arguments)


def test_a_failure_that_a_looser_form_explains_says_so_and_stays_a_failure():
    """Catches a looser profile that is granted in silence, and a hint that is not given."""
    d = Draw(1, torch.bfloat16)
    norm = Replay(CONTRACTS["norm.rms"], {"x": d.act(96, 64), "weight": d.norm_weight(64), "eps": 1e-5})
    low = norm.wide(torch.float32)
    j = told(norm, low.run(Rounder(EAGER.points_of("norm.rms"), leave=("out",)))[0].bfloat16(), BF16)
    assert not j.passed
    assert "consistent with the looser form 'cast_first' of profile eager-bf16" in j.message
    replay, candidate = mlp(1, factor=1.05)
    wrong = told(replay, candidate(BF16), BF16)
    assert not wrong.passed
    assert "consistent" not in wrong.message


def test_a_wrong_parameter_is_not_excused_by_a_looser_form():
    """Catches a hint that a wide claim would hold where the whole error is one parameter, small against wide noise."""
    for seed in range(3):
        replay = dense(Draw(seed, torch.bfloat16), rows=16)
        low = replay.wide(torch.float32).changed(scale=replay.arguments["scale"] * 1.002)
        wrong = told(replay, low.run(Rounder(BF16.points_of("mla.attention"), leave=("out",)))[0].bfloat16(), BF16)
        assert wrong.pattern == "wrong softmax scale"
        assert "consistent" not in wrong.message


def test_slack_is_told_and_a_claim_that_is_used_is_not():
    """Catches silence about a claim under which a fault of half its size passes."""
    for seed in range(3):
        replay = dense(Draw(seed, torch.bfloat16))
        loose = with_form(BF16, CONTRACTS["mla.attention"], "eager")
        y = replay.wide(torch.float32).run()[0].bfloat16()
        assert "consistent with the tighter form 'float32_p'" in told(replay, y, loose).message
        honest = replay.wide(torch.float32).run(Rounder(BF16.points_of("mla.attention"), leave=("out",)))[0].bfloat16()
        assert told(replay, honest, BF16).message == ""
