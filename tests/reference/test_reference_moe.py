"""Routing, dispatch, experts and the MXFP4 conversion against loops over rows, experts and elements."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import formats, moe

F64 = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def test_router_scores():
    """Catches softmax for sigmoid, and scores in the activations' type (the router is float32)."""
    x, w = random(3, 4), random(5, 4, seed=1)
    sigmoid = moe.router_scores(x, weight=w, scoring="sigmoid")
    assert torch.allclose(sigmoid, 1 / (1 + torch.exp(-(x @ w.T))), rtol=0, atol=1e-15)
    soft = moe.router_scores(x, weight=w, scoring="softmax")
    assert torch.allclose(soft, torch.exp(x @ w.T) / torch.exp(x @ w.T).sum(-1, keepdim=True), rtol=0, atol=1e-15)
    assert moe.router_scores(x.bfloat16(), weight=w.bfloat16(), scoring="sigmoid").dtype == torch.float32
    with pytest.raises(ValueError, match="scoring"):
        moe.router_scores(x, weight=w, scoring="tanh")


def routed(scores, bias, k, groups, kept, renormalise, scale):
    """The routing rule for one row of Python floats: {expert: weight}."""
    size = len(scores) // groups
    biased = [s + b for s, b in zip(scores, bias, strict=True)]
    worth = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    stay = sorted(range(groups), key=lambda g: (-worth[g], g))[:kept] if groups > 1 else [0]
    order = sorted((e for e in range(len(scores)) if e // size in stay), key=lambda e: (-biased[e], e))[:k]
    total = sum(scores[e] for e in order) + 1e-20 if renormalise else 1.0
    return {e: scores[e] / total * scale for e in order}


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_route_follows_the_rule(data):
    """Catches bias in the weights, one best instead of two per group, masked groups at 0 (a biased score may be
    negative), another tie rule, and weights of the wrong expert."""
    groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    kept = data.draw(st.integers(1, groups))
    k = data.draw(st.integers(1, size * kept))
    score = st.sampled_from([0.0, 0.125, 0.25, 0.5, 0.75, 1.0])  # few values, exact sums: ties are common
    scores = data.draw(st.lists(score, min_size=groups * size, max_size=groups * size))
    bias = data.draw(st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25]), min_size=len(scores), max_size=len(scores)))
    renormalise = data.draw(st.booleans())
    ids, weights = moe.route(
        torch.tensor([scores], dtype=F64), bias=torch.tensor(bias), k=k, groups=groups, kept_groups=kept,
        renormalise=renormalise, scale=2.5,
    )  # fmt: skip
    expected = routed(scores, bias, k, groups, kept, renormalise, 2.5)
    assert ids[0].tolist() == sorted(expected)
    assert weights[0].tolist() == pytest.approx([expected[e] for e in sorted(expected)], abs=1e-12)


def test_route_of_all_zero_scores_is_finite():
    """Catches a renormalisation without the 1e-20 (gotcha 5): 0 / 0."""
    ids, weights = moe.route(torch.zeros(1, 4), k=2, groups=1, kept_groups=1, renormalise=True, scale=1.0)
    assert (ids.tolist(), weights.tolist(), weights.dtype) == ([[0, 1]], [[0.0, 0.0]], torch.float32)


def test_route_ranks_nan_last_and_refuses_the_impossible():
    """Catches NaN chosen before a number (torch sorts it first), and a row with fewer than k experts."""
    scores = torch.tensor([[math.nan, 0.1, 0.2, math.nan]])
    args = dict(groups=1, kept_groups=1, renormalise=False, scale=1.0)
    assert moe.route(scores, k=2, **args)[0].tolist() == [[1, 2]]
    for k, groups, kept in ((5, 1, 1), (3, 2, 1), (1, 3, 1), (1, 2, 3)):
        with pytest.raises(ValueError, match="impossible"):
            moe.route(scores, k=k, groups=groups, kept_groups=kept, renormalise=False, scale=1.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6), st.integers(1, 3), st.data())
def test_dispatch_and_combine_are_inverse(rows, k, data):
    """Catches an unstable order, a padding id dispatched, offsets off by one, and weights of the wrong pair."""
    ids = data.draw(st.lists(st.lists(st.integers(-1, 4), min_size=k, max_size=k), min_size=rows, max_size=rows))
    x, weights = random(rows, 3), random(rows, k, seed=1)
    y, order, active, offsets = moe.dispatch(x, ids=torch.tensor(ids, dtype=torch.int64).reshape(rows, k), experts=5)
    flat = [e for row in ids for e in row]
    expected = sorted((e, pair) for pair, e in enumerate(flat) if e >= 0)
    assert order.tolist() == [pair for _, pair in expected]
    assert active.tolist() == sorted({e for e, _ in expected})
    assert [len(list(g)) for _, g in itertools.groupby(expected, lambda p: p[0])] == offsets.diff().tolist()
    assert offsets[0] == 0
    assert torch.equal(y, x[[pair // k for _, pair in expected]])
    out = moe.combine(y * 2, order=order, weights=weights)
    for r in range(rows):
        total = sum(float(weights[r, c]) for c in range(k) if ids[r][c] >= 0)
        assert torch.allclose(out[r], 2 * total * x[r], rtol=0, atol=1e-13)


def test_dispatch_refuses_an_expert_that_is_not_there():
    """Catches an id beyond the last expert that would be dispatched silently."""
    with pytest.raises(ValueError, match="expert id 5"):
        moe.dispatch(torch.zeros(1, 2), ids=torch.tensor([[5]]), experts=5)


ACTIVATIONS = {
    "silu": (dict(activation="silu"), lambda g, u: g / (1 + math.exp(-g)) * u),
    "situ": (
        dict(activation="situ", beta=4.0, linear_beta=25.0),
        lambda g, u: 4 * math.tanh(g / 4) / (1 + math.exp(-g)) * 25 * math.tanh(u / 25),
    ),
    "situ_bare": (dict(activation="situ"), lambda g, u: math.tanh(g) / (1 + math.exp(-g)) * u),
    "clamped": (
        dict(activation="clamped", limit=1.5),
        lambda g, u: min(g, 1.5) / (1 + math.exp(-min(g, 1.5))) * max(-1.5, min(1.5, u)),
    ),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_mlp_and_activations_element_by_element(name):
    """Catches sigmoid of the bounded gate, a gate clamped from below, gate and up exchanged, a missing tanh on up."""
    args, act = ACTIVATIONS[name]
    x, gate, up, down = 2 * random(3, 4), random(5, 4, seed=1), random(5, 4, seed=2), random(4, 5, seed=3)
    y = moe.mlp(x, gate=gate, up=up, down=down, **args)
    for r in range(3):
        g, u = ([sum(float(x[r, i] * w[j, i]) for i in range(4)) for j in range(5)] for w in (gate, up))
        h = [act(a, b) for a, b in zip(g, u, strict=True)]
        for o in range(4):
            assert abs(float(y[r, o]) - sum(h[j] * float(down[o, j]) for j in range(5))) < 1e-11


def test_unknown_activation_and_missing_limit_are_refused():
    """Catches an activation that silently falls back to SwiGLU."""
    x, w = torch.zeros(1, 2), torch.zeros(2, 2)
    for args in (dict(activation="gelu"), dict(activation="clamped")):
        with pytest.raises(ValueError, match="activation"):
            moe.mlp(x, gate=w, up=w, down=w, **args)


def test_experts_are_mlps_on_their_own_pairs():
    """Catches pairs given to a neighbour's weights, w1 and w3 exchanged, and the point "out" called per expert."""
    x, w1, w3, w2 = random(6, 4), random(3, 5, 4, seed=1), random(3, 5, 4, seed=2), random(3, 4, 5, seed=3)
    seen = []
    y = moe.experts(
        x, offsets=torch.tensor([0, 2, 2, 6]), w1=w1, w3=w3, w2=w2, activation="silu",
        round=lambda point, value: seen.append(point) or value,
    )  # fmt: skip
    for e, rows in ((0, slice(0, 2)), (2, slice(2, 6))):
        assert torch.allclose(
            y[rows], moe.mlp(x[rows], gate=w1[e], up=w3[e], down=w2[e], activation="silu"), rtol=0, atol=1e-13
        )
    assert seen == ["gate", "up", "h"] * 2 + ["out"]


def test_experts_decode_fp8_payload_with_its_column_scales():
    """Catches a scale per row block, a scale of the wrong columns, and a last block that is cut short."""
    generator = torch.Generator().manual_seed(5)
    payloads, scales, plain = [], [], []
    for rows, columns in ((6, 160), (6, 160), (160, 6)):
        payload = formats.e4m3_encode(torch.randn(2, rows, columns, generator=generator))
        scale = torch.exp2(torch.randint(-4, 4, (2, rows, -(-columns // 128)), generator=generator).float())
        values = payload.to(F64)
        for a, n, c in itertools.product(range(2), range(rows), range(columns)):
            values[a, n, c] *= float(scale[a, n, c // 128])
        payloads.append(payload)
        scales.append(scale)
        plain.append(values)
    x, offsets = random(5, 160), torch.tensor([0, 2, 5])
    y = moe.experts(
        x, offsets=offsets, w1=payloads[0], w3=payloads[1], w2=payloads[2], w1_scale=scales[0], w3_scale=scales[1],
        w2_scale=scales[2], activation="silu",
    )  # fmt: skip
    expected = moe.experts(x, offsets=offsets, w1=plain[0], w3=plain[1], w2=plain[2], activation="silu")
    assert torch.equal(y, expected)


# --------------------------------------------------------------------------------------------------------- conversion


def decoded(payload, block_scale):
    return formats.fp8_columns_decode(payload, block_scale, dtype=F64)


def test_every_code_at_every_scale_converts_exactly():
    """Catches any wrong entry of the conversion: 16 codes x 255 scales, swapped nibbles and a lost sign of zero."""
    packed = formats.mxfp4_pack(torch.arange(128, dtype=torch.uint8) % 16).expand(1, 255, 64)
    scale = torch.arange(255, dtype=torch.uint8)[None, :, None].expand(1, 255, 4)
    payload, block_scale, inexact = moe.convert_experts(packed, scale=scale, experts=torch.tensor([0]))
    truth = formats.mxfp4_decode(packed, scale, dtype=F64)
    assert inexact.tolist() == [0]
    assert torch.equal(decoded(payload, block_scale), truth)
    assert torch.equal(torch.signbit(payload.to(F64)), torch.signbit(truth))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_conversion_is_exact_or_counted(data):
    """Catches an element that is wrong but not counted, or counted though it is right, at any spread of exponents."""
    groups, low = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 230))
    scale = torch.tensor(
        [[data.draw(st.lists(st.integers(low, low + 24), min_size=groups, max_size=groups))] for _ in range(2)]
    ).to(torch.uint8)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    codes = torch.randint(0, 16, (2, 1, groups, 32), generator=generator)
    empty = torch.rand(2, 1, groups, 1, generator=generator) < 0.2  # groups of zeros must not widen the spread
    packed = formats.mxfp4_pack(codes.masked_fill(empty, 8).to(torch.uint8).flatten(2))
    payload, block_scale, inexact = moe.convert_experts(packed, scale=scale, experts=torch.tensor([1, 0]))
    truth = formats.mxfp4_decode(packed, scale, dtype=F64)[[1, 0]]
    got = decoded(payload, block_scale)
    assert int(inexact) == int((got != truth).sum())
    assert bool((got.abs() <= truth.abs() * 4 / 3).all())  # flushed or rounded to the next step, never overflown
    spread = 0
    for e, block in itertools.product(range(2), range(-(-groups // 4))):
        own = [int(scale[e, 0, g]) for g in range(4 * block, min(4 * block + 4, groups)) if not empty[e, 0, g, 0]]
        spread = max(spread, max(own) - min(own) if own else 0)
    assert spread > 14 or int(inexact) == 0


@pytest.mark.parametrize(
    ("spread", "code", "lost"), [(14, 1, 0), (14, 3, 0), (15, 1, 32), (15, 3, 32), (15, 2, 0), (15, 4, 0)]
)
def test_spread_fourteen_is_exact_and_fifteen_loses_only_half_and_three_halves(spread, code, lost):
    """Catches a block exponent other than e_max - 6: a spread of 14 must still be exact, to the element."""
    codes = torch.zeros(1, 1, 128, dtype=torch.uint8)
    codes[..., :32], codes[..., 32:64] = 7, code
    scale = torch.tensor([[[100 + spread, 100, 0, 200]]], dtype=torch.uint8)  # the last two groups are zero
    packed = formats.mxfp4_pack(codes)
    payload, block_scale, inexact = moe.convert_experts(packed, scale=scale, experts=torch.tensor([0]))
    assert int(inexact) == lost
    assert block_scale.tolist() == [[[2.0 ** (100 + spread - 6 - 127)]]]
    wrong = decoded(payload, block_scale) != formats.mxfp4_decode(packed, scale, dtype=F64)
    assert int(wrong.sum()) == lost


def test_conversion_writes_into_the_workspace_and_returns_views():
    """Catches a copy in place of a view, and rows of the workspace touched beyond the active experts."""
    packed = torch.randint(0, 256, (3, 4, 32), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    scale = torch.full((3, 4, 2), 120, dtype=torch.uint8)
    payload_out = torch.full((5, 4, 64), 0x11, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale_out = torch.full((5, 4, 1), 9.0)
    experts = torch.tensor([2, 0])
    payload, block_scale, _ = moe.convert_experts(
        packed, scale=scale, experts=experts, payload_out=payload_out, scale_out=scale_out
    )
    assert payload.data_ptr() == payload_out.data_ptr()
    assert block_scale.data_ptr() == scale_out.data_ptr()
    assert torch.equal(decoded(payload, block_scale), formats.mxfp4_decode(packed, scale, dtype=F64)[experts])
    assert bool((payload_out.view(torch.uint8)[2:] == 0x11).all())
    assert bool((scale_out[2:] == 9).all())


def test_conversion_names_the_scale_that_is_nan():
    """Catches code 255 converted to a number; experts that are not active are not looked at."""
    packed, scale = torch.zeros(2, 3, 32, dtype=torch.uint8), torch.full((2, 3, 2), 120, dtype=torch.uint8)
    scale[1, 2, 1] = 255
    moe.convert_experts(packed, scale=scale, experts=torch.tensor([0]))
    with pytest.raises(ValueError, match="expert 1, row 2, group 1"):
        moe.convert_experts(packed, scale=scale, experts=torch.tensor([0, 1]))
