"""Guards the legality of quantised activations, and linears that are judged on the candidate's own codes."""

import pytest
import torch

from day0check.accelerated.ops import TABLE
from day0check.accelerated.ops.arithmetic import dequantised
from day0check.compare.compute import judge_compute
from day0check.compare.forms import beside_other_forms
from day0check.compare.local import Judge
from day0check.compare.quantise import judge_quantiser
from day0check.compare.replay import Replay
from day0check.compare.rounding import Rounder, round_blocks
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw, generate
from day0check.contracts.profiles import FP8_INNER, PROFILES, other_forms
from day0check.probe.recorder import Caller, Recorder
from day0check.probe.registry import Operators
from day0check.probe.rows import RowMap

BF16, FP8 = PROFILES["bf16"], PROFILES["fp8-activations"]
CONTRACT = CONTRACTS["quantise.rows"]
LARGEST = 448.0


def scales(x):
    """float32 amax / 448 of each block of 128 columns."""
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    amax = blocks.abs().amax(-1)
    return torch.where(amax > 0, amax / LARGEST, 1.0)


def codes(x, scale, round_=lambda v: v.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)):
    blocks = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128))
    return round_(blocks / scale[..., None]).flatten(1)[:, : x.shape[1]].contiguous()


def half_up(v):
    """E4M3 with ties away from zero: a hair is added before rounding to nearest."""
    return (v * (1 + 2.0**-20)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def judge(x, q, s):
    return judge_quantiser(x, (q, s))[0]


def rows(seed=0, count=96, width=192, scale=1.0):
    return Draw(seed, torch.bfloat16).rows("uneven_rows", count, width, scale=scale)


@pytest.mark.parametrize("name", CONTRACT.hard_inputs)
def test_reference_and_fast_path_are_legal_on_every_hard_input(name):
    """Catches a rule that cries wolf on zeros, tiny values, one row or blocks cut short."""
    x = generate(CONTRACT, name, 3, torch.bfloat16).args[0]
    for function in (CONTRACT.function(), TABLE["quantise.rows"]):
        judged = judge(x, *function(x))
        assert judged.passed, judged.message
        assert judged.rows == len(x)


def test_legal_variants_differ_in_codes_and_raise_nothing():
    """Catches a comparison with our own codes: powers of two, reciprocals, half up and bfloat16 scales are legal."""
    for seed in range(40):
        x, s = rows(seed), scales(rows(seed))
        powers = torch.exp2(torch.ceil(torch.log2(s)))
        low = s.bfloat16().float()
        inverse = codes(x, 1 / (1 / s))
        variants = [(codes(x, powers), powers), (codes(x, low), low), (codes(x, s, half_up), s), (inverse, s)]
        for q, own in variants:
            judged = judge(x, q, own)
            assert judged.passed, judged.message
        assert any(not torch.equal(q.float(), codes(x, s).float()) for q, _ in variants)
        assert judge(x, codes(x, powers), powers).message == "scales are powers of two"


def test_a_scale_that_is_not_that_of_its_codes_is_told_with_its_factor():
    """Catches scales rounded up to powers of two under the old codes, and one block's scale two percent too large."""
    x, s = rows(), scales(rows())
    powers = torch.exp2(torch.ceil(torch.log2(s)))
    kept = judge(x, codes(x, s), powers)
    assert (kept.failing, kept.pattern) == ("half_steps", "scale blocks")
    assert "1.9" in kept.message
    one = s.clone()
    one[17, 0] *= 1.02
    judged = judge(x, codes(x, s), one)
    assert (judged.failing, judged.row) == ("half_steps", 17)


@pytest.mark.parametrize(
    ("change", "failing", "pattern"),
    [
        (lambda x, s: (codes(x, 0.8 * s), 0.8 * s), "half_steps", "saturated"),
        (lambda x, s: (codes(x, 3 * s), 3 * s), "scale", "wrong scale"),
        (lambda x, s: (codes(x, -s), -s), "half_steps", "not a number"),
        (lambda x, s: (codes(x * 1.5, s), s), "half_steps", None),
        (lambda x, s: (codes(x, s), s.double()), "dtype", "wrong dtype"),
        (lambda x, s: (codes(x, s), s[:, :1]), "shape", "wrong shape"),
    ],
)
def test_each_breach_of_the_rule_is_named(change, failing, pattern):
    """Catches a clause of the rule that cannot fail."""
    x = rows(1)
    judged = judge(x, *change(x, scales(x)))
    assert judged.failing == failing
    assert pattern is None or judged.pattern == pattern


def test_a_nan_code_is_illegal_unless_the_value_is_no_number():
    """Catches a NaN that a quantiser makes, and one accused for what it was given."""
    x = rows(2)
    q, s = codes(x, scales(x)), scales(x)
    q.view(torch.uint8)[5, 9] = 0x7F
    assert (judge(x, q, s).pattern, judge(x, q, s).row) == ("not a number", 5)
    for value in (torch.nan, torch.inf):
        x[5, 9] = value
        assert judge(x, q, s).passed


def linear(seed, rows_=64):
    d = Draw(seed, torch.bfloat16)
    x, weight = d.rows("outlier_channel", rows_, 320), d.weight(96, 320)
    q, s = CONTRACT.function()(x)
    return x, Replay(CONTRACTS["mla.query"], {"x": q, "weight": weight, "x_scale": s})


def test_a_linear_is_judged_on_the_candidates_own_codes():
    """Catches quantisation taken for noise: one scale two percent off, and the last columns of one row lost."""
    for seed in range(4):
        _, replay = linear(seed)
        args = dict(replay.arguments)
        y = TABLE["mla.query"](args["x"], weight=args["weight"], x_scale=args["x_scale"])
        healthy = judge_compute(replay, (y,), FP8, seed=seed)[0]
        assert healthy.passed, healthy.message
        assert healthy.statistics["whole"] < 0.85
        scale = args["x_scale"].clone()
        scale[9, 1] *= 1.0078
        wrong = TABLE["mla.query"](args["x"], weight=args["weight"], x_scale=scale)
        judged = judge_compute(replay, (wrong,), FP8, seed=seed)[0]
        assert (judged.failing, judged.row, judged.pattern) == ("element", 9, "one row")
        cut = args["x"].clone()
        cut.view(torch.uint8)[3, -32:] = 0
        lost = judge_compute(
            replay, (TABLE["mla.query"](cut, **{k: args[k] for k in ("weight", "x_scale")}),), FP8, seed=0
        )
        assert (lost[0].failing, lost[0].row) == ("element", 3)


def test_an_operator_that_quantises_inside_is_healthy_under_the_profile_alone():
    """Catches an FP8 kernel that is refused under its own claim, or passes under bf16."""
    for seed in range(4):
        x, replay = linear(seed)
        plain = Replay(replay.contract, {"x": x, "weight": replay.arguments["weight"]})
        quantised = round_blocks(x.float(), "float8_e4m3fn/128").bfloat16()
        y = TABLE["mla.query"](quantised, weight=replay.arguments["weight"])
        assert judge_compute(plain, (y,), FP8, seed=seed)[0].passed
        assert not judge_compute(plain, (y,), BF16, seed=seed)[0].passed
        wrong = judge_compute(
            plain, (TABLE["mla.query"](quantised, weight=replay.arguments["weight"] * 1.1),), FP8, seed=seed
        )
        assert not wrong[0].passed


def test_codes_that_nobody_claimed_are_a_finding_inside_a_model_and_not_alone():
    """Catches rows quantised under a bf16 claim, and an operator accused where it is only tried."""
    x = rows(3)
    for profile, place, passes in ((BF16, "layers.00", False), (FP8, "layers.00", True), (BF16, "operators", True)):
        seen = []
        recorder = Recorder([Judge(profile, seen.append)])
        with recorder.step("prefill", RowMap(("text/x#1",), (0,) * len(x), tuple(range(len(x)))), 0):
            Caller(Operators(TABLE), recorder).at(place)("quantise.rows", x, site="mla.query.down")
        recorder.end_case()
        assert seen[-1].passed == passes, (profile.name, place)
        assert passes or "consistent with profile fp8-activations" in seen[-1].message


def test_rows_quantised_between_two_matrices_are_named_and_healthy_under_a_file_that_claims_them():
    """Catches experts that are refused for what their profile may claim, and a refusal that does not say what fits."""
    d = Draw(4, torch.bfloat16)
    weights = {"gate": d.weight(256, 192), "up": d.weight(256, 192), "down": d.weight(96, 256)}
    x, scale = CONTRACT.function()(d.act(64, 192))
    replay = Replay(CONTRACTS["mlp.dense"], {"x": x, **weights, "activation": "silu", "x_scale": scale})
    ((form, inner),) = [o for o in other_forms(FP8, replay.contract, looser=True) if o[0] == FP8_INNER]
    points = inner.points_of("mlp.dense")
    assert points["h"] == "float8_e4m3fn/128"
    for mode in ("nearest", "random"):
        decoded = Replay(replay.contract, {**replay.arguments, "x": dequantised(x, scale), "x_scale": None})
        generator = torch.Generator().manual_seed(1)
        y = decoded.wide(torch.float32).run(Rounder(points, mode, generator, leave=("out",)))[0].bfloat16()
        assert judge_compute(replay, (y,), inner, seed=2)[0].passed
        judged = judge_compute(replay, (y,), FP8, seed=2)
        assert not judged[0].passed
        (told,) = beside_other_forms(judged, replay, (y,), FP8, seed=2)
        assert f"consistent with the looser form '{form}'" in told.message
