"""Guards slopes and named directions: small wrong factors are seen, named and sized, and healthy results pass."""

import pytest
import torch

from day0check.compare.compute import judge_compute
from day0check.compare.judgement import beyond
from day0check.compare.replay import Replay
from day0check.compare.rounding import Rounder, round_nearest
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw
from day0check.contracts.profiles import PROFILES

BF16, EAGER = PROFILES["bf16"], PROFILES["eager-bf16"]
PROJECTED = ("slope", "direction", "error_")


def candidate(replay, profile, change=lambda arguments: arguments):
    """A float32 implementation that rounds to nearest where the profile rounds, on changed arguments."""
    low = replay.wide(torch.float32)
    low = Replay(low.contract, change(dict(low.arguments)))
    points = profile.points_of(replay.contract.name)
    return tuple(
        round_nearest(y, "bfloat16").bfloat16() if spec.dtype == "act" else y
        for y, spec in zip(low.run(Rounder(points, leave=("out",))), replay.contract.results, strict=True)
    )


def judged(replay, results, profile, *, seed=5, thorough=True):
    return judge_compute(replay, results, profile, seed=seed, thorough=thorough)


def seen_without_projections(judgement):
    limits = {k: v for k, v in judgement.limits.items() if not k.startswith(PROJECTED)}
    return beyond(judgement.statistics, limits)


def attention(seed, rows=160):
    d = Draw(seed, torch.bfloat16)
    keys = d.act(2, 96, 1, 96)
    return Replay(
        CONTRACTS["mla.attention"],
        {
            "q": d.act(rows, 4, 96),
            "keys": keys,
            "values": keys[..., :64].contiguous(),
            "owner": torch.arange(rows) * 2 // rows,
            "visible": 30 + torch.arange(rows) % 60,
            "scale": 0.2,
        },
    )


def norm(seed, rows=320):
    d = Draw(seed, torch.bfloat16)
    return Replay(CONTRACTS["norm.rms"], {"x": d.act(rows, 512), "weight": d.norm_weight(512), "eps": 1e-5})


def delta_rule(seed, rows=128):
    d = Draw(seed, torch.bfloat16)
    arguments = {n: d.act(rows, 4, 32) for n in ("q", "k", "v")}
    arguments |= {"g": -5 * torch.sigmoid(d.raw(rows, 4, 32, scale=2.0) - 3), "beta": torch.sigmoid(d.raw(rows, 4))}
    arguments |= {
        "state": d.float32(2, 4, 32, 32, scale=0.5),
        "offsets": d.whole([0, rows // 2 + 6, rows]),
        "chunk": 64,
    }
    return Replay(CONTRACTS["kda.attention"], arguments)


def experts(seed, pairs=192):
    d = Draw(seed, torch.bfloat16)
    offsets = d.whole([0, 50, 90, 150, pairs])
    weights = {n: d.act(4, *s, scale=0.09) for n, s in (("w1", (96, 128)), ("w3", (96, 128)), ("w2", (128, 96)))}
    return Replay(
        CONTRACTS["moe.experts"], {"x": d.act(pairs, 128), "offsets": offsets, **weights, "activation": "silu"}
    )


def scaled(name, factor):
    return lambda a: a | {name: a[name] * factor}


def one_head(a):
    """The softmax scale of head 2 is wrong."""
    q = a["q"].clone()
    q[:, 2] *= 1.002
    return a | {"q": q}


def one_expert(a):
    """The last matrix of the second expert is wrong."""
    w2 = a["w2"].clone()
    w2[1] *= 1.004
    return a | {"w2": w2}


FAULTS = {
    "softmax scale": (attention, BF16, scaled("scale", 1.002), "wrong softmax scale", "softmax scale 0.2"),
    "scale of one head": (attention, BF16, one_head, "wrong softmax scale of one head", "softmax scale of head 2 0.2"),
    "everything in a norm": (norm, EAGER, scaled("weight", 1.0002), "constant factor", "everything 0.02"),
    "beta": (delta_rule, EAGER, scaled("beta", 1.0015), "wrong beta", "beta 0.15"),
    "one expert": (experts, BF16, one_expert, "one expert", "expert number 1 0.4"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_small_wrong_factors_are_seen_named_and_sized_only_by_projections(name):
    """Catches a projection that lost its power, names another parameter, or estimates another size."""
    make, profile, change, pattern, words = FAULTS[name]
    for seed in range(3):
        replay = make(seed)
        failed = [j for j in judged(replay, candidate(replay, profile, change), profile) if not j.passed]
        assert failed, (name, seed)
        assert not any(seen_without_projections(j) for j in failed)
        told = failed[0]
        assert (told.pattern, words in told.message or round_of(told, words)) == (pattern, True), (seed, told)
        assert all(j.passed for j in judged(replay, candidate(replay, profile), profile))


def round_of(told, words):
    """The message's percentage is that of `words` to one digit."""
    subject, _, size = words.rpartition(" ")
    found = told.message.partition("%")[0].rpartition(" ")
    return told.message.startswith(subject) and round(float(found[2]) / float(size)) == 1


@pytest.mark.parametrize("make", [attention, norm, delta_rule, experts])
@pytest.mark.parametrize("profile", [BF16, pytest.param(EAGER, marks=pytest.mark.slow)], ids=lambda p: p.name)
def test_forty_healthy_inputs_raise_no_alarm(make, profile):
    """Catches limits below what healthy rounding reaches, where nearest rounding is biased as well."""
    for seed in range(40):
        replay = make(100 + seed) if make is experts else make(100 + seed, 96)
        for j in judged(replay, candidate(replay, profile), profile, seed=seed):
            assert j.passed, (seed, j)


def test_rounding_to_nearest_that_is_biased_is_no_constant_factor():
    """Catches an alarm on a softmax close to one, which rounding to nearest always rounds up."""
    d = Draw(3, torch.bfloat16)
    rows = 400
    keys = torch.zeros(1, 2, 1, 8)
    keys[0, 0, 0, 0], keys[0, :, 0, 4:] = 1.0, d.raw(2, 4)
    q = torch.zeros(rows, 4, 8)
    q[..., 0] = 7.0 + 0.3 * d.uniform(rows, 4)
    replay = Replay(
        CONTRACTS["mla.attention"],
        {
            "q": q.bfloat16(),
            "keys": keys.bfloat16(),
            "values": keys[..., 4:].bfloat16(),
            "owner": torch.zeros(rows, dtype=torch.int64),
            "visible": torch.full((rows,), 2),
            "scale": 1.0,
        },
    )
    for j in judged(replay, candidate(replay, BF16), BF16):
        assert j.passed, j
    assert not judged(replay, candidate(replay, BF16, scaled("values", 1.004)), BF16)[0].passed


def test_a_parameter_is_estimated_where_something_is_conspicuous_without_being_asked():
    """Catches a fault of a layer outside the sample that a ratio shows and nothing explains."""
    replay = attention(1)
    wrong = candidate(replay, BF16, scaled("scale", 1.02))
    (quiet,) = judged(replay, candidate(replay, BF16), BF16, thorough=False)
    assert "direction_scale" not in quiet.statistics
    (told,) = judged(replay, wrong, BF16, thorough=False)
    assert told.failing not in ("slope", "direction_scale")
    assert "softmax scale 1.9" in told.message or "softmax scale 2" in told.message


def test_a_wrong_parameter_is_told_where_the_element_bound_fails():
    """Catches a message that only says 'everywhere' where the whole error is one factor on beta."""
    replay = delta_rule(2)
    (y, state) = judged(replay, candidate(replay, BF16, scaled("beta", 1.01)), BF16)
    assert y.failing == state.failing == "element"
    assert "; beta 0.99" in y.message or "; beta 1" in y.message


def test_the_power_is_the_error_that_shows():
    """Catches a printed power better than what is found: a factor of twice the power must fail, a tenth must pass."""
    for seed in range(4):
        replay = experts(seed)
        (healthy,) = judged(replay, candidate(replay, BF16), BF16)
        assert healthy.power < 2e-3
        for times, passed in ((2.0, False), (0.1, True)):
            y = candidate(replay, BF16, scaled("w2", 1 + times * healthy.power))
            assert judged(replay, y, BF16)[0].passed == passed, (seed, times)
