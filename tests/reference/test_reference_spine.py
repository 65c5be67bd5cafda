"""Linear layers, norms, RoPE and the residual spine against loops and hand-computed values."""

import math

import pytest
import torch

from reference import linear, norm, residual, rope
from reference.config import Yarn
from reference.rounding import exact, wide

F64 = torch.float64


def random(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


class Points:
    """A `round` that writes down the points it was asked for."""

    def __init__(self):
        self.seen = []

    def __call__(self, point, value):
        self.seen.append(point)
        return value


def test_wide_is_float32_unless_a_tensor_is_float64():
    """Catches a float64 oracle that silently computes in float32, and bf16 that is not widened."""
    half, single, double = (torch.ones(1, dtype=d) for d in (torch.bfloat16, torch.float32, F64))
    assert [t.dtype for t in wide(half, single)] == [torch.float32] * 2
    a, none, b = wide(half, None, double)
    assert (a.dtype, none, b.dtype) == (F64, None, F64)
    assert exact("p", half) is half


def test_linear_and_per_head_are_sums_of_products():
    """Catches a weight used untransposed, heads mixed up, or a lost bias."""
    x, w, b = random(3, 4), random(5, 4, seed=1), random(5, seed=2)
    y = linear.linear(x, weight=w, bias=b)
    for r in range(3):
        for o in range(5):
            assert abs(float(y[r, o]) - (sum(float(x[r, i] * w[o, i]) for i in range(4)) + float(b[o]))) < 1e-14
    xh, wh = random(3, 2, 4), random(2, 4, 5, seed=3)
    yh = linear.per_head(xh, weight=wh)
    for h in range(2):
        assert torch.allclose(yh[:, h], xh[:, h] @ wh[h], rtol=0, atol=1e-14)


def test_result_dtypes_follow_the_contract():
    """Catches logits rounded to bfloat16, and activations left in float32."""
    x, w = random(3, 4, dtype=torch.bfloat16), random(5, 4, dtype=torch.bfloat16)
    assert linear.linear(x, weight=w).dtype == torch.bfloat16
    assert linear.linear_float32(x, weight=w).dtype == torch.float32
    assert linear.linear_float32(x.to(F64), weight=w).dtype == F64
    assert torch.equal(linear.linear(x, weight=w), (x.float() @ w.float().T).bfloat16())


def test_embed_keeps_bytes():
    """Catches a lookup that converts or reorders rows."""
    table = random(7, 3, dtype=torch.bfloat16)
    assert torch.equal(linear.embed(torch.tensor([6, 0, 6]), weight=table), torch.stack([table[6], table[0], table[6]]))


def test_rms_norm_by_hand():
    """Catches a mean that is a sum, eps outside the root, and a mean that is subtracted."""
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0]], dtype=F64)
    w = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)
    y = norm.rms_norm(x, weight=w, eps=0.75)
    assert torch.allclose(
        y, torch.tensor([[3.0, 8.0, 0.0, 0.0]], dtype=F64) / math.sqrt(25 / 4 + 0.75), rtol=0, atol=1e-15
    )
    assert norm.rms_norm(torch.zeros(1, 4), eps=1e-5).tolist() == [[0, 0, 0, 0]]


def test_rms_norm_rounds_before_the_weight_then_out():
    """Catches the two points in the wrong order: x/rms is cast before the weight multiplies."""
    points = Points()
    norm.rms_norm(random(2, 4), weight=random(4), eps=1e-5, round=points)
    assert points.seen == ["normalised", "out"]
    down = lambda point, value: value.bfloat16().to(F64)  # noqa: E731
    x, w = random(2, 64), random(64, seed=1)
    cast_first = (x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()).bfloat16().to(F64) * w
    assert torch.equal(norm.rms_norm(x, weight=w, eps=1e-5, round=down), cast_first.bfloat16().to(F64))


def test_layer_norm_and_l2_norm_by_hand():
    """Catches the unbiased variance and an eps outside the root of the L2 norm."""
    y = norm.layer_norm(
        torch.tensor([[1.0, 3.0]], dtype=F64), weight=torch.tensor([2.0, 2.0]), bias=torch.tensor([5.0, 6.0]), eps=3.0
    )
    assert torch.allclose(y, torch.tensor([[5 - 2 / 2, 6 + 2 / 2]], dtype=F64), rtol=0, atol=1e-15)
    small = torch.tensor([3e-4, 4e-4], dtype=F64)
    assert torch.allclose(norm.l2_norm(small), small / math.sqrt(25e-8 + 1e-6), rtol=1e-15, atol=0)


# ------------------------------------------------------------------------------------------------------------- rope


def turned(x, position, theta, pairs):
    """x [d] with every pair (a, b) of channels rotated as a complex number; float32 angle."""
    y, d = x.clone(), len(x)
    for i, (a, b) in enumerate(pairs):
        frequency = torch.tensor(theta ** (-2 * i / d), dtype=torch.float32)
        angle = float(torch.tensor(float(position), dtype=torch.float32) * frequency)
        z = complex(float(x[a]), float(x[b])) * complex(math.cos(angle), math.sin(angle))
        y[a], y[b] = z.real, z.imag
    return y


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_turns_the_pairs_of_its_layout(layout):
    """Catches one layout used for the other (gotcha 1) and a rotation in the wrong sense."""
    d, theta = 8, 100.0
    pairs = (
        [(i, i + d // 2) for i in range(d // 2)] if layout == "half" else [(2 * i, 2 * i + 1) for i in range(d // 2)]
    )
    x, positions = random(5, 2, d), torch.tensor([0, 1, 7, 1000, 123456])
    y = rope.apply_rope(x, positions=positions, theta=theta, layout=layout)
    for r in range(5):
        for h in range(2):
            expected = turned(x[r, h], int(positions[r]), theta, pairs)
            assert torch.allclose(y[r, h], expected, rtol=0, atol=1e-13)


def test_rope_angle_is_float32_even_for_float64():
    """Catches a float64 angle, which cries wolf from about 1e5 positions."""
    x, positions = torch.tensor([[[1.0, 0.0] * 32]], dtype=F64), torch.tensor([1_000_003])
    y = rope.apply_rope(x, positions=positions, theta=10000.0, layout="interleaved")
    double = torch.tensor([math.cos(1_000_003 * 10000.0 ** (-2 * i / 64)) for i in range(32)], dtype=F64)
    assert float((y[0, 0, 0::2] - double).abs().max()) > 1e-3
    single = rope.apply_rope(x.float(), positions=positions, theta=10000.0, layout="interleaved")
    assert float((y - single).abs().max()) < 1e-6


def test_rope_none_returns_x_and_other_layouts_are_refused():
    """Catches a rotation where the model has none, and a misspelt layout taken for one."""
    x = random(2, 1, 8)
    assert rope.apply_rope(x, positions=torch.tensor([3, 4]), theta=10.0, layout="none") is x
    for layout, width in (("neox", 8), ("half", 7)):
        with pytest.raises(ValueError, match="layout"):
            rope.apply_rope(x[..., :width], positions=torch.tensor([3, 4]), theta=10.0, layout=layout)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    """Catches an inverted ramp, and bounds computed from d/2. V3.2: d 64, base 10000, 4096 -> bounds 10 and 23."""
    yarn = Yarn(factor=40.0, original_positions=4096)
    plain, scaled = rope.frequencies(64, theta=10000.0), rope.frequencies(64, theta=10000.0, yarn=yarn)
    assert torch.equal(scaled[:11], plain[:11])
    assert torch.allclose(scaled[23:], plain[23:] / 40, rtol=3e-7, atol=0)
    middle = 10000.0 ** (-2 * 17 / 64)
    ramp = (17 - 10) / 13
    assert math.isclose(float(scaled[17]), middle / 40 * ramp + middle * (1 - ramp), rel_tol=3e-7)


def test_yarn_attention_factor_is_the_ratio_of_two_mscales():
    """Catches mscale squared or used alone on cos and sin; it is 1 for V3.2."""
    assert rope.attention_factor(Yarn(factor=40.0, original_positions=4096)) == 1
    uneven = Yarn(factor=40.0, original_positions=4096, mscale=2.0, mscale_all_dim=0.5)
    ratio = (0.2 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert math.isclose(rope.attention_factor(uneven), ratio, rel_tol=1e-15)
    x = torch.tensor([[[1.0, 0.0]]], dtype=F64)
    y = rope.apply_rope(x, positions=torch.tensor([0]), theta=10.0, layout="half", yarn=uneven)
    assert math.isclose(float(y[0, 0, 0]), ratio, rel_tol=1e-15)


# --------------------------------------------------------------------------------------------------------- residual


def test_add_rounds_once():
    """Catches a sum that is rounded on the way."""
    x, y = random(4, 8, dtype=torch.bfloat16), random(4, 8, seed=1, dtype=torch.bfloat16)
    assert torch.equal(residual.add(x, y=y), (x.to(F64) + y.to(F64)).bfloat16())


def test_attention_mix_per_row_from_the_definition():
    """Catches normed values mixed in place of the raw ones, and a norm weight left out of the logits."""
    v, w, a, eps = random(3, 4, 6) * 3, random(6, seed=1), random(6, seed=2), 1e-5
    y = residual.attention_mix(v, norm_weight=w, proj=a, eps=eps)
    for r in range(3):
        logits = []
        for i in range(4):
            rms = math.sqrt(sum(float(e) ** 2 for e in v[r, i]) / 6 + eps)
            logits.append(sum(float(a[d] * w[d] * v[r, i, d]) / rms for d in range(6)))
        p = [math.exp(z - max(logits)) for z in logits]
        for d in range(6):
            assert abs(float(y[r, d]) - sum(p[i] * float(v[r, i, d]) for i in range(4)) / sum(p)) < 1e-12
    one = residual.attention_mix(v[:, :1], norm_weight=w, proj=a, eps=eps)
    assert torch.equal(one, v[:, 0])


def test_store_writes_one_slot_and_stored_sees_a_wrong_one():
    """Catches a write into a neighbouring slot and a read-back that cannot fail."""
    bank, value = torch.zeros(3, 4, 2, dtype=torch.bfloat16), random(3, 2)
    assert residual.store(bank, value=value, slot=2) is None
    assert bank[:2].abs().sum() == 0
    found, expected = residual.stored(bank, value=value, slot=2)
    assert torch.equal(found, expected)
    bank[2, 1, 0] += 1
    assert not torch.equal(*residual.stored(bank, value=value, slot=2))


def test_stream_coefficients_per_row_from_the_definition():
    """Catches e added to post, softmax over the wrong axis, rows normalised first, and eps taken for hc_eps."""
    n, d, eps, e, iterations = 3, 4, 1e-2, 1e-3, 5
    x, fn, base = random(2, n, d), random(n * (2 + n), n * d, seed=1), random(n * (2 + n), seed=2)
    scale = torch.tensor([0.5, 1.5, 2.0], dtype=F64)
    pre, post, comb = residual.stream_coefficients(
        x, fn=fn, base=base, scale=scale, eps=eps, hc_eps=e, iterations=iterations
    )
    sigmoid = lambda t: 1 / (1 + math.exp(-t))  # noqa: E731
    for r in range(2):
        flat = [float(t) for t in x[r].flatten()]
        rms = math.sqrt(sum(t * t for t in flat) / len(flat) + eps)
        z = [sum(float(fn[o, i]) * flat[i] / rms for i in range(n * d)) for o in range(n * (2 + n))]
        assert [float(t) for t in pre[r]] == pytest.approx(
            [sigmoid(z[i] * 0.5 + float(base[i])) + e for i in range(n)], abs=1e-12
        )
        assert [float(t) for t in post[r]] == pytest.approx(
            [2 * sigmoid(z[n + i] * 1.5 + float(base[n + i])) for i in range(n)], abs=1e-12
        )
        m = [[z[2 * n + i * n + j] * 2.0 + float(base[2 * n + i * n + j]) for j in range(n)] for i in range(n)]
        m = [[math.exp(t) / sum(map(math.exp, row)) + e for t in row] for row in m]
        for step in range(2 * iterations - 1):
            if step % 2 == 0:
                sums = [sum(m[i][j] for i in range(n)) + e for j in range(n)]
                m = [[m[i][j] / sums[j] for j in range(n)] for i in range(n)]
            else:
                m = [[t / (sum(row) + e) for t in row] for row in m]
        assert comb[r].flatten().tolist() == pytest.approx([t for row in m for t in row], abs=1e-12)


def test_streams_collapse_and_update_by_index():
    """Catches comb used transposed: its first index is the stream that is read."""
    x, f, pre, post, comb = (
        random(2, 3, 4),
        random(2, 4, seed=1),
        random(2, 3, seed=2),
        random(2, 3, seed=3),
        random(2, 3, 3, seed=4),
    )
    one, many = residual.collapse_streams(x, pre=pre), residual.update_streams(x, output=f, post=post, comb=comb)
    for r in range(2):
        for d in range(4):
            assert abs(float(one[r, d]) - sum(float(pre[r, i] * x[r, i, d]) for i in range(3))) < 1e-12
            for j in range(3):
                expected = float(post[r, j] * f[r, d]) + sum(float(comb[r, i, j] * x[r, i, d]) for i in range(3))
                assert abs(float(many[r, j, d]) - expected) < 1e-12
