"""Attention and the indexer against loops over one row, head and key at a time; select against a sort in Python."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import attention, linear

F64 = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def softmax_mix(q, keys, values, scale):
    """Attention of one head of one row over lists of keys and values, with Python floats."""
    if not keys:
        return None
    s = [scale * sum(float(a) * float(b) for a, b in zip(q, k, strict=True)) for k in keys]
    p = [math.exp(x - max(s)) for x in s]
    width = len(values[0])
    return [sum(p[i] * float(values[i][c]) for i in range(len(keys))) / sum(p) for c in range(width)]


class Points:
    def __init__(self):
        self.seen = []

    def __call__(self, point, value):
        self.seen.append(point)
        return value


@pytest.mark.parametrize("key_heads", [1, 3])
@pytest.mark.parametrize(
    ("owner", "visible"),
    [
        ([0, 0, 0, 1, 1, -1, 0], [1, 2, 3, 1, 5, 4, 0]),  # ragged, a padding row, a row without keys
        ([1, 2, 0], [5, 0, 2]),  # one row per request: the batched path
        ([2], [4]),
        ([-1, -1], [3, 3]),
    ],
)
def test_attention_row_by_row(key_heads, owner, visible):
    """Catches keys of another request, a visible count off by one, and heads that share the wrong key."""
    rows, heads, d, dv, n = len(owner), 3, 4, 2, 5
    q, keys, values = random(rows, heads, d), random(3, n, key_heads, d, seed=1), random(3, n, key_heads, dv, seed=2)
    y = attention.attention(
        q, keys=keys, values=values, owner=torch.tensor(owner), visible=torch.tensor(visible), scale=0.7
    )
    for r in range(rows):
        for h in range(heads):
            count, hk = (visible[r] if owner[r] >= 0 else 0), (h if key_heads > 1 else 0)
            expected = (
                softmax_mix(q[r, h], list(keys[owner[r], :count, hk]), list(values[owner[r], :count, hk]), 0.7)
                or [0.0] * dv
            )
            assert y[r, h].tolist() == pytest.approx(expected, abs=1e-12)


def test_attention_in_small_blocks_is_the_same(monkeypatch):
    """Catches rows lost or doubled at the edge of a memory block, in both paths and in the indexer and select."""
    q, keys, values = random(9, 2, 4), random(2, 6, 1, 4, seed=1), random(2, 6, 1, 3, seed=2)
    owner = torch.tensor([1, 0, 0, 1, 0, 0, -1, 0, 1])
    visible = torch.tensor([3, 1, 2, 6, 4, 5, 2, 6, 1])
    weights = random(9, 2, seed=3)

    def everything():
        y = attention.attention(q, keys=keys, values=values, owner=owner, visible=visible, scale=0.5)
        s = attention.index_scores(q, weights=weights, keys=keys[:, :, 0], owner=owner, scale=0.5)
        i = attention.select(s, k=3, visible=visible)
        own = keys[owner.clamp(min=0), :, 0]
        z = attention.sparse_attention(q, keys=own, valid=torch.arange(6) < visible[:, None], value_width=2, scale=0.5)
        return y, s, i, z

    whole = everything()
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 40)
    for a, b in zip(whole, everything(), strict=True):
        assert torch.allclose(a.to(F64), b.to(F64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("rows_of_one_request", [True, False])
def test_keys_that_a_row_does_not_see_never_reach_it(rows_of_one_request):
    """Catches 0 x NaN: unused cache slots may hold anything, also where a later row of the request does see them."""
    keys, values = random(2, 4, 1, 3), random(2, 4, 1, 2, seed=1)
    owner = torch.tensor([0, 0]) if rows_of_one_request else torch.tensor([0, 1])
    q, visible = random(2, 2, 3, seed=2), torch.tensor([2, 3])
    clean = attention.attention(q, keys=keys, values=values, owner=owner, visible=visible, scale=1.0)
    values[:, 3], keys[:, 3] = math.nan, math.inf
    hidden = attention.attention(q, keys=keys, values=values, owner=owner, visible=visible, scale=1.0)
    assert torch.equal(hidden, clean)
    values[:, 2] = math.nan
    seen = attention.attention(q, keys=keys, values=values, owner=owner, visible=visible, scale=1.0)
    assert torch.equal(seen[0], clean[0])
    assert bool(torch.isnan(seen[1]).all())


def test_attention_rounds_at_its_points_in_order():
    """Catches a point that is skipped, and "out" called more than once."""
    points = Points()
    attention.attention(
        random(3, 1, 2), keys=random(1, 3, 1, 2), values=random(1, 3, 1, 2), owner=torch.zeros(3, dtype=torch.int64),
        visible=torch.tensor([1, 2, 3]), scale=1.0, round=points,
    )  # fmt: skip
    assert points.seen == ["s", "p", "out"]
    points = Points()
    attention.sparse_attention(
        random(3, 1, 2), keys=random(3, 4, 2), valid=torch.ones(3, 4, dtype=torch.bool), value_width=1, scale=1.0,
        round=points,
    )  # fmt: skip
    assert points.seen == ["s", "p", "out"]


def test_bfloat16_inputs_are_computed_wide_and_returned_in_bfloat16():
    """Catches a softmax in bfloat16."""
    q, keys = (3 * random(4, 2, 8)).bfloat16(), random(1, 16, 1, 8, seed=1).bfloat16()
    args = dict(owner=torch.zeros(4, dtype=torch.int64), visible=torch.tensor([1, 5, 9, 16]), scale=1.0)
    y = attention.attention(q, keys=keys, values=keys, **args)
    truth = attention.attention(q.to(F64), keys=keys.to(F64), values=keys.to(F64), **args)
    assert y.dtype == torch.bfloat16
    assert bool(((y.to(F64) - truth).abs() <= truth.abs() * 2.0**-8).all())


def test_absorbed_equals_plain_latent_attention():
    """Catches Wuk or Wuv taken from the wrong half of kv_b_proj, or a scale of the latent width."""
    rows, heads, dn, dr, dv, c = 6, 3, 5, 2, 4, 7
    latent, rope_key = random(1, rows, c), random(1, rows, dr, seed=1)
    q, kv_b = random(rows, heads, dn + dr, seed=2), random(heads * (dn + dv), c, seed=3)
    common = dict(
        owner=torch.zeros(rows, dtype=torch.int64), visible=torch.arange(1, rows + 1), scale=(dn + dr) ** -0.5
    )
    expanded = linear.linear(latent[0], weight=kv_b).reshape(1, rows, heads, dn + dv)
    shared = rope_key[:, :, None].expand(1, rows, heads, dr)
    plain = attention.attention(
        q, keys=torch.cat([expanded[..., :dn], shared], -1), values=expanded[..., dn:], **common
    )
    per_head = kv_b.reshape(heads, dn + dv, c)
    query = torch.cat([linear.per_head(q[..., :dn], weight=per_head[:, :dn]), q[..., dn:]], -1)
    cache = torch.cat([latent, rope_key], -1)[:, :, None]
    z = attention.attention(query, keys=cache, values=latent[:, :, None], **common)
    absorbed = linear.per_head(z, weight=per_head[:, dn:].transpose(1, 2))
    assert float((absorbed - plain).abs().max()) < 1e-12
    every_key = attention.sparse_attention(
        query, keys=cache[:, :, 0].expand(rows, rows, c + dr), valid=torch.ones(rows, rows).tril().bool(),
        value_width=c, scale=common["scale"],
    )  # fmt: skip
    assert float((every_key - z).abs().max()) < 1e-12


def test_sparse_attention_row_by_row():
    """Catches invalid keys counted, values wider than asked, and NaN from a row without any key."""
    q, keys = random(4, 2, 3), random(4, 5, 3, seed=1)
    valid = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]], dtype=torch.bool)
    keys[~valid] = math.nan
    y = attention.sparse_attention(q, keys=keys, valid=valid, value_width=2, scale=0.3)
    for r in range(4):
        own = [keys[r, j] for j in range(5) if valid[r, j]]
        for h in range(2):
            expected = softmax_mix(q[r, h], own, [k[:2] for k in own], 0.3) or [0.0, 0.0]
            assert y[r, h].tolist() == pytest.approx(expected, abs=1e-12)


def test_merged_parts_equal_attention_over_all_keys():
    """Catches parts joined without their log-sum-exp, and NaN of an empty part."""
    s, v = random(2, 3, 6), random(2, 3, 6, 4, seed=1)  # rows, heads, keys
    whole = (torch.softmax(s, -1)[..., None] * v).sum(2)
    cuts = [(0, 1), (1, 1), (1, 6)]
    parts = torch.stack([(torch.softmax(s[..., a:b], -1)[..., None] * v[:, :, a:b]).sum(2) for a, b in cuts], 1)
    lse = torch.stack([torch.logsumexp(s[..., a:b], -1) for a, b in cuts], 1)
    parts[:, 1] = math.nan
    assert float((attention.merge_partial(parts, lse=lse) - whole).abs().max()) < 1e-13
    assert attention.merge_partial(parts, lse=torch.full_like(lse, -math.inf)).abs().sum() == 0


def test_gated_output_by_index():
    """Catches silu for sigmoid, and a gate applied after the projection."""
    x, gate, w = random(2, 3), random(2, 3, seed=1), random(4, 3, seed=2)
    y, bare = attention.gated_output(x, gate=gate, weight=w), attention.gated_output(x, weight=w)
    for r in range(2):
        for o in range(4):
            gated = [float(x[r, i]) / (1 + math.exp(-float(gate[r, i]))) for i in range(3)]
            assert abs(float(y[r, o]) - sum(gated[i] * float(w[o, i]) for i in range(3))) < 1e-13
    assert torch.equal(bare, x @ w.T)


# --------------------------------------------------------------------------------------------------- lightning indexer


def test_index_weights_scale_with_the_number_of_heads():
    """Catches HI^-1/2 taken from the head dim or left out (gotcha 6)."""
    x, w = random(2, 3), random(4, 3, seed=1)
    assert torch.allclose(attention.index_weights(x, weight=w), x @ w.T / 2, rtol=0, atol=1e-15)
    assert attention.index_weights(x.bfloat16(), weight=w.bfloat16()).dtype == torch.float32


def test_index_key_is_a_layer_norm_of_the_projection():
    """Catches an RMS norm, a lost bias, and the points in the wrong order."""
    x, w, nw, nb = random(2, 5), random(4, 5, seed=1), random(4, seed=2), random(4, seed=3)
    points = Points()
    y = attention.index_key(x, weight=w, norm_weight=nw, norm_bias=nb, eps=1e-6, round=points)
    assert points.seen == ["projected", "out"]
    expected = torch.nn.functional.layer_norm(x @ w.T, (4,), nw, nb, 1e-6)
    assert torch.allclose(y, expected, rtol=0, atol=1e-13)


def test_pool_key_per_channel():
    """Catches a softmax over channels, and the position bias left out."""
    keys, gates, ape = random(2, 3, 4), random(2, 3, 4, seed=1), random(3, 4, seed=2)
    y = attention.pool_key(keys, gates=gates, ape=ape)
    for p in range(2):
        for c in range(4):
            e = [math.exp(float(gates[p, t, c] + ape[t, c])) for t in range(3)]
            assert abs(float(y[p, c]) - sum(e[t] * float(keys[p, t, c]) for t in range(3)) / sum(e)) < 1e-13


@pytest.mark.parametrize("owner", [[0, 0, 1, -1], [1, 0, 2, -1]])
def test_index_scores_row_by_row(owner):
    """Catches ReLU after the weight (weights may be negative), and keys hidden that are not yet visible."""
    q, weights, keys = random(4, 3, 2), random(4, 3, seed=1), random(3, 5, 2, seed=2)
    y = attention.index_scores(q, weights=weights, keys=keys, owner=torch.tensor(owner), scale=0.25)
    for r in range(4):
        for n in range(5):
            expected = 0.0
            if owner[r] >= 0:
                for h in range(3):
                    dot = sum(float(q[r, h, d] * keys[owner[r], n, d]) for d in range(2))
                    expected += float(weights[r, h]) * 0.25 * max(0.0, dot)
            assert abs(float(y[r, n]) - expected) < 1e-13


def chosen(scores, k, visible, threshold=None):
    """The documented rule in Python: numbers before NaN, larger before smaller, lower index before higher."""
    eligible = [i for i in range(min(visible, len(scores))) if threshold is None or scores[i] >= threshold]
    order = sorted(eligible, key=lambda i: (math.isnan(scores[i]), -scores[i] if not math.isnan(scores[i]) else 0, i))
    return sorted(order[:k])


some_score = st.one_of(st.sampled_from([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan, 5e-324]), st.floats(width=32))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(some_score, min_size=1, max_size=12),
    st.integers(0, 14),
    st.integers(0, 14),
    st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 1.0])),
    st.sampled_from([F64, torch.float32]),
)
def test_select_follows_the_documented_rule(scores, k, visible, threshold, dtype):
    """Catches another tie rule, the future, NaN ranked first, -0.0 below 0.0, and k beyond the number of keys."""
    row = torch.tensor([scores], dtype=dtype)
    y = attention.select(row, k=k, visible=torch.tensor([visible]), threshold=threshold)
    assert y.dtype == torch.int32
    assert y.shape == (1, k)
    expected = chosen(row[0].tolist(), k, visible, threshold)
    assert y[0].tolist() == expected + [-1] * (k - len(expected))


def test_select_on_a_plateau_of_zeros_takes_the_lowest_indices():
    """Catches torch.topk's own order, which is not stable (gotcha 4), on rows long enough for it to matter."""
    scores = torch.zeros(2, 5000)
    scores[0, 4000], scores[1, ::7] = 1.0, 2.0
    y = attention.select(scores, k=100, visible=torch.tensor([5000, 650]))
    assert y[0].tolist() == [*range(99), 4000]
    best = list(range(0, 650, 7))
    filler = [i for i in range(650) if i % 7][: 100 - len(best)]
    assert y[1].tolist() == sorted(best + filler)
