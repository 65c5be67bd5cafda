"""Guards the measured limit of compute operators: healthy variants pass on many inputs, planted faults are caught."""

import pytest
import torch

from day0check.compare.compute import judge_compute
from day0check.compare.judgement import Judgement
from day0check.compare.metrics import judge_result
from day0check.compare.one_rounding import Expected
from day0check.compare.replay import Replay
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw
from day0check.contracts.profiles import PROFILES

BF16, FP32 = PROFILES["bf16"], PROFILES["fp32"]
SEEDS = range(12)


def judged(operator, arguments, *results, profile=BF16, keep=None) -> list[Judgement]:
    return judge_compute(Replay(CONTRACTS[operator], arguments), results, profile, seed=5, keep=keep)


def failing(judgements) -> set[str]:
    return {j.failing for j in judgements if not j.passed}


# ------------------------------------------------------------------------------------------------------------ linear


def linear_call(seed, *, rows=48, width=256, out=96):
    d = Draw(seed, torch.bfloat16)
    x = d.rows("uneven_rows" if seed % 2 else "outlier_channel", rows, width)
    return {"x": x, "weight": d.weight(out, width)}


def linear_sums(arguments, *, blocks=1, partial=torch.float32, accumulate=torch.float32):
    """x W^T by running sums over blocks of the inner width, each partial sum in one type and the total in another."""
    x, w = arguments["x"].float(), arguments["weight"].float()
    total = torch.zeros(x.shape[0], w.shape[0]).to(accumulate)
    for a, b in zip(x.chunk(blocks, 1), w.chunk(blocks, 1), strict=True):
        total = (total.float() + (a @ b.T).to(partial).float()).to(accumulate)
    return total


def test_healthy_linears_pass_in_any_order_of_sums():
    """Catches a bound that cries wolf on split-K in float32 or on one product after the other."""
    for seed in SEEDS:
        arguments = linear_call(seed)
        for blocks in (1, 2, 8, 256):
            (j,) = judged("mla.query", arguments, linear_sums(arguments, blocks=blocks).bfloat16())
            assert j.passed, (seed, blocks, j)
            assert j.statistics["whole"] < 0.8


def tile(y):
    y[16:32, 32:48] *= 1.02


def column(y):
    y[:, 7] *= 1.004


def row(y):
    y[9] *= 1.25


def not_a_number(y):
    y[3, 4] = float("nan")


@pytest.mark.parametrize(
    ("fault", "pattern"), [(tile, "one tile"), (column, "one column"), (row, "one row"), (not_a_number, "not a number")]
)
def test_faults_of_a_linear_are_caught_and_placed(fault, pattern):
    """Catches a statistic that no longer sees a row, a tile, a column or a NaN."""
    for seed in SEEDS:
        arguments = linear_call(seed, rows=128, out=256)
        y = linear_sums(arguments)
        fault(y)
        (j,) = judged("mla.query", arguments, y.bfloat16())
        assert not j.passed
        assert j.pattern == pattern
        assert j.row == {"one tile": 16, "one row": 9, "not a number": 3}.get(pattern, j.row)


def test_one_element_off_by_one_ulp_is_caught_at_its_row():
    """Catches an element bound as wide as a rounding."""
    for seed in SEEDS:
        arguments = linear_call(seed)
        y = linear_sums(arguments).bfloat16()
        y.view(torch.int16)[11, 5] += 1
        (j,) = judged("mla.query", arguments, y)
        assert (j.failing, j.row, j.pattern) == ("element", 11, "one element")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_accumulators_are_caught(dtype):
    """Catches a floor that swallows an accumulator of 11 or 8 bits: ratios alone are blind to the first."""
    for seed in SEEDS:
        arguments = linear_call(seed)
        arguments["x"] = arguments["x"].clamp(-8, 8)
        (j,) = judged("mla.query", arguments, linear_sums(arguments, blocks=64, accumulate=dtype).bfloat16())
        assert j.failing == "element"


def test_truncation_instead_of_rounding_is_caught():
    """Catches a bound of a whole ulp."""
    arguments = linear_call(0)
    y = linear_sums(arguments)
    (j,) = judged("mla.query", arguments, (y.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16())
    assert j.failing == "element"


def test_float32_results_are_held_to_float32_sums():
    """Catches scores or logits that went through bf16 or TF32 and are called float32."""
    for seed in SEEDS:
        arguments = linear_call(seed)
        y = linear_sums(arguments)
        assert judged("head.logits", arguments, y)[0].passed
        assert failing(judged("head.logits", arguments, y.bfloat16().float())) == {"element"}
        tf32 = (y.view(torch.int32) & ~0x1FFF).view(torch.float32)
        assert failing(judged("head.logits", arguments, tf32)) == {"element"}


def test_the_fp32_profile_passes_float32_and_fails_bf16():
    """Catches a float32 profile that grants bf16 rounding, or float32 sums of float32 factors called wrong."""
    for seed in SEEDS:
        d = Draw(seed, torch.float32)
        arguments = {"x": d.act(64, 384), "weight": d.weight(128, 384)}
        assert judged("mla.query", arguments, linear_sums(arguments, blocks=384), profile=FP32)[0].passed
        assert failing(judged("mla.query", arguments, linear_sums(arguments).bfloat16(), profile=FP32)) == {"element"}


def test_power_is_a_factor_that_is_really_seen():
    """Catches a printed power that promises more than the judgement sees."""
    arguments = linear_call(1)
    y = linear_sums(arguments)
    (j,) = judged("mla.query", arguments, y.bfloat16())
    assert 0 < j.power < 1e-3
    assert not judged("mla.query", arguments, (y.double() * (1 + 3 * j.power)).bfloat16())[0].passed


# -------------------------------------------------------------------------------------------------------------- norms


def norm(x, weight, eps):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


@pytest.mark.parametrize("name", ["plain", "outlier_channel", "uneven_rows", "zero_row", "small_norm_row"])
def test_healthy_norms_pass_and_a_wrong_eps_shows_on_a_row_of_small_norm(name):
    """Catches an alarm on zero rows, and blindness to eps 1e-6 in place of 1e-5."""
    for seed in SEEDS:
        d = Draw(seed, torch.bfloat16)
        arguments = {"x": d.rows(name, 40, 64), "weight": d.norm_weight(64), "eps": 1e-5}
        x, w = arguments["x"], arguments["weight"]
        assert judged("norm.rms", arguments, norm(x, w, 1e-5).bfloat16())[0].passed
        (j,) = judged("norm.rms", arguments, norm(x, w, 1e-6).bfloat16())
        if name == "small_norm_row":
            assert not j.passed


# ---------------------------------------------------------------------------------------------------------- attention


def flash(q, keys, valid, value_width, scale, *, base_two=False):
    """Unnormalised probabilities in bf16, their float32 sum divided out at the end."""
    s = scale * torch.einsum("rhd,rkd->rhk", q.float(), keys.float())
    s = s.masked_fill(~valid[:, None], -torch.inf)
    top = s.amax(-1, keepdim=True)
    p = torch.exp2((s - top) * 1.4426950408889634) if base_two else (s - top).exp()
    y = torch.einsum("rhk,rkv->rhv", p.bfloat16().float(), keys[..., :value_width].float())
    return (y / p.sum(-1, keepdim=True)).bfloat16()


def attention_call(seed, *, rows=96, sharpness=1.0):
    d = Draw(seed, torch.bfloat16)
    return {
        "q": d.rows("outlier_channel" if seed % 3 == 0 else "plain", rows, 4, 48),
        "keys": d.act(rows, 64, 48),
        "valid": (d.uniform(rows, 64) < 0.9) | (torch.arange(64) == 0),
        "value_width": 32,
        "scale": sharpness * 48**-0.5,
    }


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_flash_attention_passes_whatever_the_sharpness(sharpness):
    """Catches an alarm where one rounded probability moves a whole row."""
    for seed in SEEDS:
        arguments = attention_call(seed, sharpness=sharpness)
        for base_two in (False, True):
            (j,) = judged("dsa.attention", arguments, flash(**arguments, base_two=base_two))
            assert j.passed, (seed, j)


def test_faults_of_attention_are_caught():
    """Catches a noise map that hides a row x 1.25, a softmax scale x 1.01, a head x 1.02 or one lost key."""
    for seed in SEEDS:
        arguments = attention_call(seed)
        healthy = flash(**arguments)
        row_off = healthy.clone()
        row_off[17] *= 1.25
        (j,) = judged("dsa.attention", arguments, row_off)
        assert (j.passed, j.row, j.pattern) == (False, 17, "one row")
        scaled = flash(**{**arguments, "scale": arguments["scale"] * 1.01})
        assert not judged("dsa.attention", arguments, scaled)[0].passed
        head = healthy.clone()
        head[:, 1] = (head[:, 1].float() * 1.02).bfloat16()
        assert not judged("dsa.attention", arguments, head)[0].passed
        lost = arguments["valid"].clone()
        top = torch.einsum("hd,kd->hk", arguments["q"][5].float(), arguments["keys"][5].float())
        lost[5, top[0].masked_fill(~lost[5], -torch.inf).argmax()] = False
        (j,) = judged("dsa.attention", arguments, flash(**{**arguments, "valid": lost}))
        assert (j.passed, j.row) == (False, 5)


def test_rows_without_a_key_give_zeros_and_padding_rows_are_free():
    """Catches an alarm on empty rows, and a padding row that is judged."""
    arguments = attention_call(1)
    arguments["valid"][7] = False
    y = torch.nan_to_num(flash(**arguments), nan=0.0)
    assert judged("dsa.attention", arguments, y)[0].passed
    y[7] = 1e-3
    (j,) = judged("dsa.attention", arguments, y)
    assert (j.passed, j.row) == (False, 7)
    keep = torch.arange(96) != 7
    assert judged("dsa.attention", arguments, y, keep=keep)[0].passed


# ---------------------------------------------------------------------------------------------------- MLP, KDA, gates


def mlp_call(seed, rows):
    d = Draw(seed, torch.bfloat16)
    x = d.rows("outlier_channel", rows, 64)
    weights = {"gate": d.weight(160, 64), "up": d.weight(160, 64), "down": d.weight(64, 160)}
    return {"x": x, **weights, "activation": "silu"}


def mlp(a, *, up_factor=1.0):
    x = a["x"].float()
    h = torch.nn.functional.silu(x @ a["gate"].float().T) * (x @ a["up"].float().T) * up_factor
    return (h.bfloat16().float() @ a["down"].float().T).bfloat16()


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_an_mlp_passes_with_few_and_many_rows(rows):
    """Catches false alarms of a noise map that stands on few samples."""
    for seed in range(30):
        arguments = mlp_call(seed, rows)
        (j,) = judged("mlp.dense", arguments, mlp(arguments))
        assert j.passed, (seed, j)


def test_a_lost_channel_and_a_wrong_factor_of_an_mlp_are_caught():
    """Catches internal noise that is measured too large."""
    for seed in SEEDS:
        arguments = mlp_call(seed, 64)
        assert not judged("mlp.dense", arguments, mlp(arguments, up_factor=1.02))[0].passed
        lost = {**arguments, "x": arguments["x"].clone()}
        lost["x"][:, 3] = 0
        assert not judged("mlp.dense", arguments, mlp(lost))[0].passed


def test_the_same_row_many_times_over_is_no_fault():
    """Catches column ratios taken over rows that repeat one another."""
    for seed in SEEDS:
        arguments = mlp_call(seed, 64)
        arguments["x"] = arguments["x"][:1].expand(64, -1).contiguous()
        assert judged("mlp.dense", arguments, mlp(arguments))[0].passed


def test_beta_through_two_sigmoids_is_caught():
    """Catches gates whose second result goes unjudged."""
    d = Draw(3, torch.bfloat16)
    arguments = {
        "f": d.act(20, 4, 16),
        "b": d.act(20, 4),
        "a_log": d.float32(4),
        "dt_bias": d.float32(4, 16),
        "lower_bound": -5.0,
    }
    z = arguments["f"].float() + arguments["dt_bias"]
    g = -5.0 * torch.sigmoid(arguments["a_log"].exp()[:, None] * z)
    beta = torch.sigmoid(arguments["b"].float())
    assert not failing(judged("kda.gates", arguments, g, beta))
    good, bad = judged("kda.gates", arguments, g, torch.sigmoid(beta))
    assert good.passed
    assert bad.failing == "element"


def recurrent(a):
    """The delta rule token by token in float32, from its definition."""
    q, k, v = (a[n].float() for n in ("q", "k", "v"))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    state, y = a["state"].clone(), torch.zeros_like(v)
    for b in range(len(a["offsets"]) - 1):
        for t in range(int(a["offsets"][b]), int(a["offsets"][b + 1])):
            s = a["g"][t].exp()[..., None] * state[b]
            error = v[t] - torch.einsum("hk,hkv->hv", k[t], s)
            s = s + torch.einsum("hk,hv->hkv", k[t], a["beta"][t][:, None] * error)
            state[b], y[t] = s, torch.einsum("hk,hkv->hv", q[t], s) * q.shape[-1] ** -0.5
    return y.bfloat16(), state


def test_a_recurrent_delta_rule_passes_as_the_chunked_one_and_a_transposed_state_fails():
    """Catches a floor that cries wolf between the two forms, and an unjudged state."""
    d = Draw(9, torch.bfloat16)
    arguments = {
        **{n: d.act(90, 2, 8) for n in ("q", "k", "v")},
        "g": -torch.nn.functional.softplus(d.float32(90, 2, 8)),
        "beta": torch.sigmoid(d.float32(90, 2)),
        "state": d.float32(2, 2, 8, 8),
        "offsets": d.whole([0, 70, 90]),
        "chunk": 64,
    }
    y, state = recurrent(arguments)
    assert not failing(judged("kda.attention", arguments, y, state))
    out, new_state = judged("kda.attention", arguments, y, state.transpose(-1, -2).contiguous())
    assert out.passed
    assert (new_state.failing, new_state.axis) == ("element", "batch")


def test_a_wrong_shape_or_number_of_results_is_a_failure_not_an_error():
    arguments = linear_call(0)
    y = linear_sums(arguments).bfloat16()
    assert failing(judged("mla.query", arguments, y[:, :-1])) == {"shape"}
    assert failing(judged("mla.query", arguments, y, y)) == {"results"}


def test_blocks_of_rows_find_the_same_row(monkeypatch):
    """Catches a block's row number given without the rows before it."""
    monkeypatch.setattr("day0check.compare.compute.BLOCK_ELEMENTS", 4000)
    arguments = linear_call(4)
    y = linear_sums(arguments)
    assert judged("mla.query", arguments, y.bfloat16())[0].passed
    y[41] *= 1.25
    (j,) = judged("mla.query", arguments, y.bfloat16())
    assert (j.row, j.rows) == (41, 48)


@pytest.mark.parametrize("operator", ["mlp.dense", "mla.query", "dsa.attention", "norm.rms"])
def test_values_that_came_in_as_nan_are_nobodys_fault_here(operator):
    """Catches an alarm, or a replay that breaks, in every operator behind the one that made the NaN."""
    arguments, run = {
        "mlp.dense": (mlp_call(3, 40), mlp),
        "mla.query": (linear_call(3), lambda a: linear_sums(a).bfloat16()),
        "dsa.attention": (attention_call(3), lambda a: flash(**a)),
        "norm.rms": (
            {"x": Draw(3, torch.bfloat16).act(40, 64), "weight": Draw(4, torch.bfloat16).norm_weight(64), "eps": 1e-5},
            lambda a: norm(a["x"], a["weight"], 1e-5).bfloat16(),
        ),
    }[operator]
    first = next(iter(arguments))
    arguments[first] = arguments[first].clone()
    arguments[first][6] = float("nan")
    (j,) = judged(operator, arguments, run(arguments))
    assert j.passed, j
    y = run(arguments)
    y[9] *= 1.25
    (j,) = judged(operator, arguments, y)
    assert (j.passed, j.row) == (False, 9)
    y = run(arguments)
    y[12, 0] = float("inf")
    assert judged(operator, arguments, y)[0].pattern == "infinite"


def test_factors_of_a_single_rounding_have_slopes():
    """Catches slopes that are missing where one rounding is all there is: row x 1.002 is 20 spreads of 800 values."""
    d = Draw(5, torch.bfloat16)
    x, w = d.act(64, 512), d.weight(800, 512)
    replay = Replay(CONTRACTS["mla.query"], {"x": x, "weight": w})
    y = x.float() @ w.float().T
    healthy = judge_compute(replay, (y.bfloat16(),), BF16, seed=0)[0]
    assert healthy.passed
    assert max(healthy.statistics[k] for k in ("slope", "slope_row", "slope_column", "slope_tile")) < 1
    y[7] *= 1.002
    row = judge_compute(replay, (y.bfloat16(),), BF16, seed=0)[0]
    assert (row.failing, row.row) == ("element", 7)
    assert row.statistics["slope_row"] > 20


def test_a_factor_inside_the_element_bound_fails_by_its_slope():
    """Catches a slope that is shown and decides nothing: the bound of terms that cancel is wider than the factor."""
    o = Draw(6, torch.bfloat16).raw(64, 96).double()
    expected = Expected(o, o.abs() * 2.0**-10, "bfloat16")
    assert judge_result(o.bfloat16(), expected).passed
    judged = judge_result((o * 1.01).bfloat16(), expected)
    assert judged.statistics["element"] <= 1
    assert (judged.failing.startswith("slope"), judged.passed) == (True, False)
    assert "% too large" in judged.message
