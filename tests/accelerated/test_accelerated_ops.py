"""The fast path's operators against their definitions, written out row by row."""

import inspect
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.accelerated.ops import FORMS, TABLE, rope
from day0check.contracts import CONTRACTS

FEW = settings(max_examples=25, deadline=None)


def draw(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_every_contract_has_an_operator_with_its_arguments():
    """Catches an operator that is missing, or whose argument names drift from its contract."""
    assert set(TABLE) == set(CONTRACTS)
    for name, contract in CONTRACTS.items():
        arguments = [a.name for a in contract.args]
        parameters = list(inspect.signature(TABLE[name]).parameters)
        assert parameters[0] == arguments[0], name
        assert set(parameters) == set(arguments), name


def test_every_operator_with_several_forms_claims_a_legal_one():
    """Catches a claim that the comparison would not know how to judge."""
    for name, contract in CONTRACTS.items():
        if contract.forms:
            assert FORMS[name] in {form.name for form in contract.forms}, name


# ------------------------------------------------------------------------------------------------------ selection


@FEW
@given(
    seed=st.integers(0, 2**31),
    columns=st.sampled_from([1, 63, 255, 256, 257, 700, 1025]),
    k=st.sampled_from([1, 7, 64, 200]),
    levels=st.sampled_from([1, 3, 40, 100000]),
)
def test_select_is_a_stable_sort(seed, columns, k, levels):
    """Catches a wrong tie rule, a winner lost between blocks, a key beyond `visible`, a wrong count."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-levels, levels + 1, (6, columns), generator=generator) / 7.0
    visible = torch.randint(0, columns + 1, (6,), generator=generator)
    found = TABLE["dsa.select"](scores, k=k, visible=visible)
    assert found.shape == (6, k)
    assert found.dtype == torch.int32
    for row, count in enumerate(visible.tolist()):
        best = torch.sort(scores[row, :count], descending=True, stable=True).indices[:k].tolist()
        kept = [i for i in found[row].tolist() if i >= 0]
        assert sorted(kept) == sorted(best)


def test_select_orders_special_values_and_obeys_a_threshold():
    """Catches -0.0 losing to 0.0, NaN winning, -inf never chosen, and a threshold that is not one."""
    scores = torch.tensor([[-0.0, 0.0, float("nan"), float("-inf"), -1.0, float("inf")]])
    everything = torch.tensor([6])

    def chosen(k, **more):
        return sorted(TABLE["dsa.select"](scores, k=k, visible=everything, **more)[0].tolist())

    assert chosen(2) == [0, 5]
    assert chosen(4) == [0, 1, 4, 5]
    assert chosen(5) == [0, 1, 3, 4, 5]
    assert chosen(6, threshold=0.0) == [-1, -1, -1, 0, 1, 5]


# ----------------------------------------------------------------------------------------------------- conversion

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """MXFP4 by its definition, float64 [N, K]."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    value = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)[codes]
    return value * torch.pow(2.0, scale.double() - 127).repeat_interleave(32, -1)


def decoded(payload: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return payload.double() * scale.double().repeat_interleave(128, -1)[..., : payload.shape[-1]]


def every_code(groups: int) -> torch.Tensor:
    """[1, 16, groups * 16] bytes in which every group sees every byte value."""
    return torch.arange(256).reshape(1, 16, 16).repeat(1, 1, groups).to(torch.uint8)


@pytest.mark.parametrize("spread", [0, 1, 12, 13, 14])
def test_conversion_is_exact_for_every_code_up_to_a_spread_of_14(spread):
    """Catches swapped nibbles, a lost sign of zero, a wrong subnormal, a shift beyond the format."""
    scale = torch.tensor([120 + spread, 120, 120 + spread // 2, 120, 121, 121, 121]).repeat(1, 16, 1).to(torch.uint8)
    packed = every_code(7)
    payload, block_scale, inexact = TABLE["moe.convert"](packed, scale=scale, experts=torch.tensor([0]))
    want = mxfp4(packed, scale)
    got = decoded(payload, block_scale)
    assert inexact.item() == 0
    assert torch.equal(got, want)
    assert torch.equal(torch.signbit(got), torch.signbit(want))


@pytest.mark.parametrize("exponent", [0, 1, 11, 12, 127, 248, 249])
def test_conversion_holds_at_every_end_of_the_exponent_range(exponent):
    """Catches E8M0 byte 0 read as zero, and a block scale beyond float32."""
    packed, scale = every_code(4), torch.full((1, 16, 4), exponent, dtype=torch.uint8)
    payload, block_scale, inexact = TABLE["moe.convert"](packed, scale=scale, experts=torch.tensor([0]))
    assert bool(block_scale.isfinite().all())
    assert inexact.item() == 0
    assert torch.equal(decoded(payload, block_scale), mxfp4(packed, scale))


@FEW
@given(seed=st.integers(0, 2**31), spread=st.integers(1, 40), groups=st.sampled_from([1, 3, 4, 9]))
def test_conversion_counts_what_it_cannot_hold(seed, spread, groups):
    """Catches an inexact element that is not counted, one counted though it is exact, and an overflow."""
    generator = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (3, 8, groups * 16), generator=generator).to(torch.uint8)
    scale = (100 + torch.randint(0, spread + 1, (3, 8, groups), generator=generator)).to(torch.uint8)
    experts = torch.tensor([2, 0])
    payload, block_scale, inexact = TABLE["moe.convert"](packed, scale=scale, experts=experts)
    got = decoded(payload, block_scale)
    want = torch.stack([mxfp4(packed[e], scale[e]) for e in experts.tolist()])
    assert int((got != want).sum()) == inexact.item()
    assert bool((got.abs() <= want.abs() * 2).all())


def test_conversion_writes_into_the_given_workspace():
    """Catches a copy made beside the workspace."""
    payload_out = torch.zeros(1, 16, 128, dtype=torch.float8_e4m3fn)
    scale_out = torch.zeros(1, 16, 1)
    scale = torch.full((1, 16, 4), 120, dtype=torch.uint8)
    payload, block_scale, _ = TABLE["moe.convert"](
        every_code(4), scale=scale, experts=torch.tensor([0]), payload_out=payload_out, scale_out=scale_out
    )
    assert payload.data_ptr() == payload_out.data_ptr()
    assert block_scale.data_ptr() == scale_out.data_ptr()
    assert torch.equal(decoded(payload_out, scale_out), mxfp4(every_code(4), scale))


# ------------------------------------------------------------------------------------------------------------ KDA


def kda_inputs(seed: int, lengths: tuple[int, ...], *, strongest: float, dtype=torch.float64) -> dict:
    rows = sum(lengths)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    g = -strongest * torch.rand(rows, 2, 8, generator=generator, dtype=torch.float64) ** 3
    return {
        "q": normal(rows, 2, 8),
        "k": normal(rows, 2, 8),
        "v": normal(rows, 2, 6),
        "g": g.to(dtype),
        "beta": torch.rand(rows, 2, generator=generator, dtype=torch.float64).to(dtype),
        "state": normal(len(lengths), 2, 8, 6),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }


def delta_rule(q, *, k, v, g, beta, state, offsets):
    """The recurrence by its definition, one token and head at a time."""
    y, states = torch.empty_like(v), state.clone()
    for b in range(len(offsets) - 1):
        for t in range(int(offsets[b]), int(offsets[b + 1])):
            for h in range(q.shape[1]):
                unit = [x / torch.sqrt((x * x).sum() + 1e-6) for x in (q[t, h], k[t, h])]
                s = torch.exp(g[t, h])[:, None] * states[b, h]
                states[b, h] = s + beta[t, h] * torch.outer(unit[1], v[t, h] - unit[1] @ s)
                y[t, h] = (unit[0] * q.shape[2] ** -0.5) @ states[b, h]
    return y, states


@pytest.mark.parametrize("chunk", [None, 16, 20, 64])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (70,), (0, 1, 65, 3), (128, 0)])
def test_kda_equals_the_recurrence(chunk, lengths):
    """Catches a lost state at a chunk's edge, padding that decays, a wrong diagonal, requests that mix."""
    inputs = kda_inputs(3, lengths, strongest=5.0)
    q = inputs.pop("q")
    want, want_state = delta_rule(q, **inputs)
    got, state = TABLE["kda.attention"](q, **inputs, chunk=chunk)
    assert torch.allclose(got, want, rtol=0, atol=1e-12)
    assert torch.allclose(state, want_state, rtol=0, atol=1e-12)


def test_kda_chunks_survive_the_strongest_decay_in_float32():
    """Catches exp(G_i) exp(-G_j): 64 tokens at -5 reach exp(320)."""
    inputs = kda_inputs(4, (200,), strongest=5.0, dtype=torch.float32)
    inputs["g"] = torch.full_like(inputs["g"], -5.0)
    inputs["g"][::7] = -1e-3
    q = inputs.pop("q")
    exact = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    want, want_state = delta_rule(q.double(), **exact)
    got, state = TABLE["kda.attention"](q, **inputs, chunk=64)
    assert torch.allclose(got.double(), want, rtol=0, atol=2e-6)
    assert torch.allclose(state.double(), want_state, rtol=0, atol=2e-6)


@FEW
@given(cuts=st.lists(st.integers(0, 9), min_size=1, max_size=5), seed=st.integers(0, 2**31))
def test_conv_in_pieces_is_conv_at_once(cuts, seed):
    """Catches a state that is not the last raw rows, also where a piece is shorter than the state."""
    rows = sum(cuts)
    x, weight = draw(seed, rows, 5, dtype=torch.float64), draw(seed + 1, 5, 4, dtype=torch.float64)
    padded = torch.cat((torch.zeros(3, 5, dtype=torch.float64), x))
    linear = sum(padded[j : j + rows] * weight[:, j] for j in range(4))
    want = linear * torch.sigmoid(linear)
    state, pieces, at = torch.zeros(1, 3, 5, dtype=torch.float64), [], 0
    for count in cuts:
        y, state = TABLE["kda.conv"](x[at : at + count], weight=weight, state=state, offsets=torch.tensor([0, count]))
        pieces.append(y)
        at += count
    assert torch.allclose(torch.cat(pieces), want, rtol=0, atol=1e-12)
    assert torch.equal(state[0], padded[rows:])


# ---------------------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("shared_head", [True, False])
def test_flash_attention_equals_softmax(shared_head):
    """Catches a wrong running maximum, a key beyond `visible`, rows of another request, a row that sees nothing."""
    heads = 1 if shared_head else 3
    keys = draw(1, 2, 1100, heads, 12, dtype=torch.float64) * 2
    values = draw(2, 2, 1100, heads, 5, dtype=torch.float64)
    q = draw(3, 9, 3, 12, dtype=torch.float64)
    owner = torch.tensor([1, 0, 0, 1, 1, 0, -1, 0, 1])
    visible = torch.tensor([1100, 1, 0, 512, 513, 700, 3, 1024, 5])
    got = TABLE["mla.attention"](q, keys=keys, values=values, owner=owner, visible=visible, scale=0.4)
    for row in range(9):
        for head in range(3):
            n, b, h = int(visible[row]), int(owner[row]), 0 if shared_head else head
            want = torch.zeros(5, dtype=torch.float64)
            if b >= 0 and n:
                want = torch.softmax(0.4 * keys[b, :n, h] @ q[row, head], 0) @ values[b, :n, h]
            assert torch.allclose(got[row, head], want, rtol=0, atol=1e-12)


def test_sparse_attention_reads_only_valid_keys():
    """Catches a value of an invalid key that leaks in, even when it is NaN, and a row without keys that is not zero."""
    q, keys = draw(1, 4, 2, 6, dtype=torch.float64), draw(2, 4, 5, 6, dtype=torch.float64)
    valid = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]], dtype=torch.bool)
    keys[~valid] = float("nan")
    got = TABLE["dsa.attention"](q, keys=keys, valid=valid, value_width=4, scale=0.7)
    for row in range(4):
        mine = keys[row][valid[row]]
        want = torch.softmax(0.7 * q[row] @ mine.T, -1) @ mine[:, :4] if len(mine) else torch.zeros(2, 4).double()
        assert torch.allclose(got[row], want, rtol=0, atol=1e-12)


def test_score_equals_its_sum():
    """Catches ReLU after the weighting, a missing scale, keys of another request, an edge between key blocks."""
    q, keys = draw(1, 5, 3, 4, dtype=torch.float64), draw(2, 2, 1030, 4, dtype=torch.float64)
    weights, owner = draw(3, 5, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 1])
    got = TABLE["dsa.score"](q, weights=weights, keys=keys, owner=owner, scale=0.5)
    for row in range(5):
        want = sum(weights[row, h] * 0.5 * (keys[owner[row]] @ q[row, h]).clamp(min=0) for h in range(3))
        assert torch.allclose(got[row], want, rtol=0, atol=1e-12)


def test_partial_results_merge_to_the_whole():
    """Catches a wrong weight of a part, and an empty part that counts."""
    s, v = draw(1, 3, 2, 30, dtype=torch.float64), draw(2, 30, 4, dtype=torch.float64)
    cuts = [(0, 10), (10, 10), (10, 30)]
    parts = torch.stack([torch.softmax(s[..., a:b], -1) @ v[a:b] for a, b in cuts], 1)
    lse = torch.stack([torch.logsumexp(s[..., a:b], -1) for a, b in cuts], 1)
    parts[:, 1] = float("nan")
    got = TABLE["mla.merge"](parts, lse=lse)
    assert torch.allclose(got, torch.softmax(s, -1) @ v, rtol=0, atol=1e-12)


@FEW
@given(seed=st.integers(0, 2**31), cuts=st.lists(st.integers(0, 40), min_size=1, max_size=4), shared=st.booleans())
def test_attention_in_parts_is_attention(seed, cuts, shared):
    """Catches a logarithm to another base or without its largest score, a key at a cut that counts twice or never, and
    a part of which a row sees nothing that weighs something."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, 40, 1 if shared else 3, 6, generator=generator, dtype=torch.float64) * 4
    q = torch.randn(5, 3, 6, generator=generator, dtype=torch.float64)
    owner, visible = torch.tensor([0, 1, 1, -1, 0]), torch.tensor([40, 0, 7, 9, 23])
    given = {"owner": owner, "scale": 0.7}
    edges = sorted({0, 40, *cuts})
    found = [
        TABLE["mla.partial"](
            q, keys=keys[:, a:b], values=keys[:, a:b, :, :4], visible=(visible - a).clamp(0, b - a), **given
        )
        for a, b in itertools.pairwise(edges)
    ]
    y, lse = (torch.stack(parts, 1) for parts in zip(*found, strict=True))
    whole = TABLE["mla.attention"](q, keys=keys, values=keys[..., :4], visible=visible, **given)
    assert torch.allclose(TABLE["mla.merge"](y, lse=lse), whole, rtol=0, atol=1e-12)
    assert bool((lse[[1, 3]] == float("-inf")).all())


def test_a_chunk_leaves_nothing_of_the_one_before_it():
    """Catches rows of an earlier chunk that stay in the workspace where a request has no more rows."""
    pool, table = torch.randn(4, 3, 5), torch.tensor([[2, 0], [3, 1]])
    workspace = torch.full((2, 4, 5), 7.0)
    indices = torch.tensor([[1, 2, 3, 4], [5, -1, -1, -1]])
    where = {"table": table, "owner": torch.tensor([0, 1]), "indices": indices}
    got = TABLE["prefix.gather"](pool, **where, out=workspace)
    assert got.data_ptr() == workspace.data_ptr()
    assert torch.equal(workspace, TABLE["kv.gather"](pool, **where))
    strided = torch.randn(4, 2, 3, 5)[:, 1]
    assert torch.equal(TABLE["prefix.gather"](strided, **where, out=workspace), TABLE["kv.gather"](strided, **where))


# ------------------------------------------------------------------------------------------------ caches and moves


@FEW
@given(seed=st.integers(0, 2**31), page=st.integers(1, 5), length=st.integers(1, 17))
def test_pages_give_back_what_was_written(seed, page, length):
    """Catches a slot computed without the table, a padding row that is written, index -1 that is read."""
    generator = torch.Generator().manual_seed(seed)
    pages = -(-length // page)
    table = torch.randperm(2 * pages + 1, generator=generator)[: 2 * pages].view(2, pages)
    pool = torch.full((2 * pages + 1, page, 3), float("nan"))
    owner = torch.tensor([*([0] * length), *([1] * length), -1])
    positions = torch.cat((torch.arange(length), torch.arange(length), torch.tensor([0])))
    value = torch.arange(len(owner) * 3.0).view(-1, 3)
    slots = TABLE["kv.slots"](table, owner=owner, positions=positions, page=page)
    assert slots[-1] == -1
    TABLE["kv.write"](pool, value=value, slots=slots)
    wanted = torch.randint(-1, length, (4, 6), generator=generator)
    reader = torch.randint(0, 2, (4,), generator=generator)
    got = TABLE["kv.gather"](pool, table=table, owner=reader, indices=wanted)
    for row in range(4):
        for column, index in enumerate(wanted[row].tolist()):
            want = torch.zeros(3) if index < 0 else value[int(reader[row]) * length + index]
            assert torch.equal(got[row, column], want)
    assert int(pool.isnan().any(-1).sum()) == (2 * pages + 1) * page - 2 * length


def test_state_slots():
    """Catches a fresh state that is not zero and a slot -1 that is written."""
    pool = torch.full((3, 2), float("nan"))
    TABLE["state.store"](pool, value=torch.tensor([[1.0, 2.0], [3.0, 4.0]]), slots=torch.tensor([2, -1]))
    got = TABLE["state.load"](pool, slots=torch.tensor([-1, 2]))
    assert got.tolist() == [[0.0, 0.0], [1.0, 2.0]]
    assert bool(pool[:2].isnan().all())


@FEW
@given(seed=st.integers(0, 2**31))
def test_dispatch_and_combine_undo_each_other(seed):
    """Catches a wrong order, an empty expert that is called active, a weight of another pair, id -1 that counts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 5, (7, 3), generator=generator)
    x, weights = draw(seed, 7, 4, dtype=torch.float64), torch.rand(7, 3, generator=generator)
    y, order, active, offsets = TABLE["moe.dispatch"](x, ids=ids, experts=9)
    flat = ids.flatten().tolist()
    want = [pair for e in range(9) for pair, chosen in enumerate(flat) if chosen == e]
    assert order.tolist() == want
    assert active.tolist() == sorted({e for e in flat if e >= 0})
    assert offsets.tolist() == [sum(0 <= e < a for e in flat) for a in active.tolist()] + [len(want)]
    assert torch.equal(y, x[order // 3])
    got = TABLE["moe.combine"](y, order=order, weights=weights)
    kept = (weights * (ids >= 0)).sum(1, keepdim=True)
    assert torch.allclose(got, x * kept, rtol=0, atol=1e-6)


def test_route_uses_the_bias_to_choose_but_not_to_weigh():
    """Catches the bias in the weights, a wrong tie rule, a group kept by its single best expert."""
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.5, 0.6, 0.3, 0.2, 0.2]])
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0])
    ids, weights = TABLE["moe.route"](scores, bias=bias, k=2, groups=4, kept_groups=1, renormalise=True, scale=2.0)
    assert sorted(ids[0].tolist()) == [4, 5]
    got = dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))
    assert got[4] == pytest.approx(2 * 0.6 / 0.9)
    assert got[5] == pytest.approx(2 * 0.3 / 0.9)
    ids, _ = TABLE["moe.route"](scores, k=3, groups=1, kept_groups=1, renormalise=False, scale=1.0)
    assert sorted(ids[0].tolist()) == [0, 2, 4]


# ---------------------------------------------------------------------------------------------------------- output


def test_sampling_is_greedy_or_a_draw_that_no_batch_changes():
    """Catches a tie given to the higher id, draws that depend on the row, and draws from another distribution."""
    logits = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), -2.0, -2.0]])
    zeros = torch.zeros(2, dtype=torch.int64)
    assert TABLE["sample.token"](logits, temperature=torch.zeros(2), seed=zeros, positions=zeros).tolist() == [1, 1]
    many, temperature = 4000, 0.7
    rows = torch.tensor([0.0, 1.0, -1.0, float("-inf")]).repeat(many, 1)
    warm, seed, at = torch.full((many,), temperature), torch.full((many,), 11), torch.arange(many)
    drawn = TABLE["sample.token"](rows, temperature=warm, seed=seed, positions=at)
    other = TABLE["sample.token"](rows[:1], temperature=warm[:1], seed=seed[:1], positions=at[1234:1235])
    assert other[0] == drawn[1234]
    share = torch.bincount(drawn, minlength=4) / many
    want = torch.softmax(rows[0] / temperature, 0)
    assert share[3] == 0
    assert torch.allclose(share, want, rtol=0, atol=0.03)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rope_depends_on_distance_alone(layout):
    """Catches a rotation in the wrong direction of one of the two channels, or of the wrong pairs."""
    q, k = draw(1, 1, 1, 8, dtype=torch.float64), draw(2, 1, 1, 8, dtype=torch.float64)

    def turned(x, position):
        return TABLE["rope.apply"](x, positions=torch.tensor([position]), theta=100.0, layout=layout).flatten()

    near = turned(q, 5) @ turned(k, 2)
    assert near == pytest.approx((turned(q, 103) @ turned(k, 100)).item(), abs=1e-4)
    assert abs(near - turned(q, 5) @ turned(k, 3)) > 1e-3
    pair = (0, 4) if layout == "half" else (0, 1)
    unit = torch.zeros(1, 1, 8, dtype=torch.float64)
    unit[..., pair[0]] = 1.0
    rotated = turned(unit, 1)
    assert rotated[pair[0]] == pytest.approx(0.5403, abs=1e-3)
    assert rotated[pair[1]] == pytest.approx(0.8415, abs=1e-3)


def test_tables_of_the_rotation_are_kept_for_a_decode_step_alone():
    """Catches tables of a whole prompt that stay alive behind the step: memory that grows with the prompt."""
    rope._latest.clear()
    for rows, kept in ((2048, 0), (rope.KEPT_ROWS, 1)):
        positions = torch.arange(rows)
        rope.rope_apply(torch.ones(rows, 1, 16), positions=positions, theta=1e4, layout="half")
        assert len(rope._latest) == kept
    rope._latest.clear()
