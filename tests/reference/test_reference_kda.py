"""KDA against the recurrence written per token, head and channel, and its chunked form against the recurrent one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import kda

F64 = torch.float64


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def inputs(lengths, heads=2, dk=4, dv=3, *, bound=-5.0, seed=0):
    rows = sum(lengths)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    g = bound * torch.rand(rows, heads, dk, generator=torch.Generator().manual_seed(seed), dtype=F64)
    beta = torch.sigmoid(random(rows, heads, seed=seed + 1))
    q, k = random(rows, heads, dk, seed=seed + 2), random(rows, heads, dk, seed=seed + 3)
    v, state = random(rows, heads, dv, seed=seed + 4), random(len(lengths), heads, dk, dv, seed=seed + 5)
    return q, dict(k=k, v=v, g=g, beta=beta, state=state, offsets=offsets)


def by_token(q, k, v, g, beta, state, offsets):
    """model.md 2.5 with one outer product per token and head."""
    y, state = torch.zeros_like(v), state.clone()
    unit = lambda x: x / math.sqrt(float((x * x).sum()) + 1e-6)  # noqa: E731
    for b in range(len(offsets) - 1):
        for t in range(int(offsets[b]), int(offsets[b + 1])):
            for h in range(q.shape[1]):
                s = torch.diag(g[t, h].exp()) @ state[b, h]
                key, query = unit(k[t, h]), unit(q[t, h]) / math.sqrt(q.shape[2])
                s = s + float(beta[t, h]) * torch.outer(key, v[t, h] - s.T @ key)
                state[b, h] = s
                y[t, h] = s.T @ query
    return y, state


@pytest.mark.parametrize("lengths", [[1], [5], [3, 0, 7, 1], [1, 1, 1, 1], [0, 0]])
@pytest.mark.parametrize("chunk", [None, 4, 64])
def test_attention_token_by_token(lengths, chunk):
    """Catches o read before the update, a transposed state, a state of another request, and q without dk^-1/2."""
    q, rest = inputs(lengths)
    y, state = kda.attention(q, **rest, chunk=chunk)
    expected_y, expected_state = by_token(q, **rest)
    assert torch.allclose(y, expected_y, rtol=0, atol=1e-12)
    assert torch.allclose(state, expected_state, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bound", [-5.0, -0.05])
def test_chunked_equals_recurrent_with_strong_and_weak_decay(bound):
    """Catches exp(G) and exp(-G) formed alone (overflow at 64 x 5), a chunk's diagonal dropped, and a ragged tail."""
    lengths = [1, 63, 64, 65, 130]
    q, rest = inputs(lengths, dk=8, dv=8, bound=bound)
    recurrent, chunked = kda.attention(q, **rest), kda.attention(q, **rest, chunk=64)
    for a, b in zip(recurrent, chunked, strict=True):
        assert bool(torch.isfinite(b).all())
        assert float((a - b).abs().max()) < 1e-12
    single = kda.attention(q.float(), **{n: t.float() if n != "offsets" else t for n, t in rest.items()}, chunk=64)
    assert float((single[0].to(F64) - recurrent[0]).abs().max()) < 1e-4


def test_beta_extremes_leave_or_overwrite_the_state():
    """Catches a sigmoid applied twice: beta 0 must change nothing but the decay, beta 1 must store v under k."""
    q, rest = inputs([1], heads=1, dk=4, dv=3)
    rest["g"] = torch.zeros_like(rest["g"])
    rest["beta"] = torch.zeros_like(rest["beta"])
    assert torch.equal(kda.attention(q, **rest)[1], rest["state"])
    rest["beta"] += 1
    key = rest["k"] / torch.sqrt((rest["k"] ** 2).sum() + 1e-6)
    stored = (key[0, 0] @ kda.attention(q, **rest)[1][0, 0]) / float((key**2).sum())
    assert torch.allclose(stored, rest["v"][0, 0], rtol=0, atol=1e-5)


def test_splitting_a_request_at_any_row_carries_the_state():
    """Catches a state that is lost at the border of two steps."""
    q, rest = inputs([9])
    whole_y, whole_state = kda.attention(q, **rest)
    for cut in range(10):
        y, state = [], rest["state"]
        for a, b in ((0, cut), (cut, 9)):
            part = {n: t[a:b] for n, t in rest.items() if n not in ("state", "offsets")}
            o, state = kda.attention(q[a:b], **part, state=state, offsets=torch.tensor([0, b - a]), chunk=4)
            y.append(o)
        assert torch.allclose(torch.cat(y), whole_y, rtol=0, atol=1e-12)
        assert torch.allclose(state, whole_state, rtol=0, atol=1e-12)


def test_small_blocks_of_heads_are_the_same(monkeypatch):
    """Catches heads lost at the edge of a memory block."""
    q, rest = inputs([20, 7], heads=3)
    whole = kda.attention(q, **rest, chunk=8)
    monkeypatch.setattr(kda, "BLOCK_ELEMENTS", 600)
    for a, b in zip(whole, kda.attention(q, **rest, chunk=8), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)


def test_attention_result_dtypes_points_and_rows_outside():
    """Catches a float32 state rounded to the activations' type, operands rounded in the recurrent form, and garbage in
    padding rows."""
    q, rest = inputs([3, 2])
    low = {n: t.bfloat16() if n in ("k", "v") else t.float() for n, t in rest.items() if n != "offsets"}
    y, state = kda.attention(q.bfloat16(), **low, offsets=rest["offsets"])
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    seen = []
    note = lambda point, value: seen.append(point) or value  # noqa: E731
    kda.attention(q, **rest, round=note)
    assert seen == ["state", "state", "out", "kept"]  # before the second and the third token, and where the call ends
    seen.clear()
    kda.attention(q, **rest, chunk=64, round=note)
    assert set(seen[:-2]) == {"operands"}
    assert seen[-2:] == ["out", "kept"]
    padded = kda.attention(q, **{**rest, "offsets": torch.tensor([0, 2, 4])}, chunk=4)[0]
    assert padded[4].abs().sum() == 0


# -------------------------------------------------------------------------------------------------------------- conv


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 2))
def test_conv_token_by_token(lengths, width, padding):
    """Catches a flipped kernel (the last weight is the current token), a lost state, and rows of a neighbour."""
    rows, channels, past = sum(lengths) + padding, 3, width - 1
    x, w, state = random(rows, channels), random(channels, width, seed=1), random(len(lengths), past, channels, seed=2)
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    y, new_state = kda.conv(x, weight=w, state=state, offsets=offsets)
    for b in range(len(lengths)):
        history = [state[b, i] for i in range(past)]
        for r in range(int(offsets[b]), int(offsets[b + 1])):
            history.append(x[r])
            for c in range(channels):
                s = sum(float(w[c, j] * history[len(history) - width + j][c]) for j in range(width))
                assert abs(float(y[r, c]) - s / (1 + math.exp(-s))) < 1e-12
        for i in range(past):
            assert torch.equal(new_state[b, i], history[len(history) - past + i])
    assert y[sum(lengths) :].abs().sum() == 0


def test_conv_state_keeps_the_raw_rows_in_their_type():
    """Catches a state taken after the convolution or the SiLU, or widened to float32."""
    x, state = random(5, 2).bfloat16(), torch.zeros(1, 3, 2, dtype=torch.bfloat16)
    y, new_state = kda.conv(x, weight=random(2, 4).float(), state=state, offsets=torch.tensor([0, 5]))
    assert (y.dtype, new_state.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(new_state[0], x[2:])


# ------------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("bound", [-5.0, None])
def test_gates_element_by_element(bound):
    """Catches the lower bound read as a clamp (gotcha 11), A outside the sigmoid, dt_bias added after the softplus."""
    f, b = 3 * random(4, 2, 3), random(4, 2, seed=1)
    a_log, dt_bias = random(2, seed=2), random(2, 3, seed=3)
    g, beta = kda.gates(f, b=b, a_log=a_log, dt_bias=dt_bias, lower_bound=bound)
    for r in range(4):
        for h in range(2):
            a = math.exp(float(a_log[h]))
            assert abs(float(beta[r, h]) - 1 / (1 + math.exp(-float(b[r, h])))) < 1e-15
            for d in range(3):
                z = float(f[r, h, d] + dt_bias[h, d])
                expected = -5 / (1 + math.exp(-a * z)) if bound else -a * math.log1p(math.exp(z))
                assert abs(float(g[r, h, d]) - expected) < 1e-13


def test_softplus_is_exact_beyond_twenty():
    """Catches torch's own softplus, linear above 20: wrong by 1e-9 at 20.5 in a float64 oracle."""
    g, _ = kda.gates(
        torch.tensor([[[20.5, -800.0, 800.0]]], dtype=F64), b=torch.zeros(1, 1), a_log=torch.zeros(1),
        dt_bias=torch.zeros(1, 3), lower_bound=None,
    )  # fmt: skip
    assert g.flatten().tolist() == [-(20.5 + math.log1p(math.exp(-20.5))), 0.0, -800.0]


def test_gates_refuse_an_a_log_that_would_broadcast_over_channels():
    """Catches gotcha 7: a stored A_log of the wrong length fits silently when it has as many entries as channels."""
    with pytest.raises(ValueError, match="a_log"):
        kda.gates(random(2, 2, 3), b=random(2, 2), a_log=torch.zeros(3), dt_bias=torch.zeros(2, 3), lower_bound=-5.0)


def test_output_element_by_element():
    """Catches a norm over all heads, silu in place of sigmoid, and the gate inside the norm."""
    x, gate, nw, w = random(2, 2, 3), random(2, 6, seed=1), random(3, seed=2), random(4, 6, seed=3)
    y = kda.output(x, gate=gate, norm_weight=nw, weight=w, eps=1e-5)
    for r in range(2):
        gated = []
        for h in range(2):
            rms = math.sqrt(sum(float(e) ** 2 for e in x[r, h]) / 3 + 1e-5)
            gated += [float(nw[c] * x[r, h, c]) / rms / (1 + math.exp(-float(gate[r, 3 * h + c]))) for c in range(3)]
        for o in range(4):
            assert abs(float(y[r, o]) - sum(gated[i] * float(w[o, i]) for i in range(6))) < 1e-12
