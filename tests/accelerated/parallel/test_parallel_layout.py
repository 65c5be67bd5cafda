"""How things are cut over ranks: nothing lost, nothing twice."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.accelerated.parallel.layout import Layout, cut, layout_of, place_experts
from day0check.accelerated.parallel.shard import Shares, grouped_heads
from day0check.errors import Unavailable, UsageError
from reference.config import Gqa
from reference.presets import preset


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 40))
def test_a_cut_covers_everything_once(count, parts, unit):
    """Catches a remainder that is lost, counted twice, or a unit that is torn between two ranks."""
    ranges = cut(count, parts, unit=unit)
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(count))
    assert all(start % unit == 0 or start == count for start, _ in ranges)
    assert max(b - a for a, b in ranges) - min(b - a for a, b in ranges) <= 2 * unit


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.integers(0, 24), st.integers(0, 24), st.integers(0, 50))
def test_every_expert_has_one_owner_for_a_row(ranks, more, redundant, row):
    """Catches a replica that is left out, or that two ranks compute for one row."""
    experts = ranks + more
    placement = place_experts(experts, ranks, redundant=min(redundant, experts))
    held = [placement.held_by(rank) for rank in range(ranks)]
    assert {e for mine in held for e in mine} == set(range(experts))
    for owners in (placement.in_turn(row), *(placement.nearest(rank) for rank in range(ranks))):
        assert all(e in held[owner] for e, owner in enumerate(owners))
    if ranks > 1:
        assert sum(map(len, held)) == experts + min(redundant, experts)


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"tensor_parallel": 0}, "0 ranks"),
        ({"tensor_parallel": 2, "expert_parallel": 4}, "do not fit"),
        ({"expert_parallel": 2, "expert_dispatch": "pigeons"}, "no 'pigeons'"),
        ({"tensor_parallel": 2, "redundant_experts": 1}, "redundant"),
        ({"tensor_parallel": 2, "sums": "gather"}, "no 'gather'"),
        ({"expert_parallel": 2, "sums": "reduce_scatter"}, "no sums of tensor parallel parts"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(wish, words):
    """Catches a layout that is silently made into another one."""
    with pytest.raises(UsageError, match=words):
        layout_of(wish)


def test_a_model_that_cannot_be_cut_is_refused_with_a_way_out():
    """Catches ranks that would have no head or no columns, and a scale block torn between ranks."""
    config = preset("tiny").config()
    with pytest.raises(Unavailable, match="2 blocks of 32 columns of an expert cannot be cut over 4 ranks"):
        Shares(config, Layout(tensor=4), 0)
    with pytest.raises(Unavailable, match="4 attention heads"):
        Shares(config, Layout(tensor=5, expert=5), 0)
    assert Shares(config, Layout(tensor=4, expert=4), 3).heads == (3, 4)


def test_uneven_heads_and_blocks_belong_to_one_rank_each():
    """Catches heads, columns or scale blocks of an uneven model that no rank has, or two have."""
    config = preset("fault-ranks").config()
    shares = [Shares(config, Layout(tensor=4, expert=4), rank) for rank in range(4)]
    assert [b - a for a, b in (s.heads for s in shares)] == [2, 2, 1, 1]
    assert [b - a for a, b in (s.columns for s in shares)] == [63, 63, 62, 62]
    assert [len(s.held_experts()) for s in shares] == [5, 5, 4, 4]
    halves = [Shares(config, Layout(tensor=2), rank) for rank in range(2)]
    packed = [s.cut_of("layers.1.block_sparse_moe.experts.0.w2.weight_packed") for s in halves]
    scales = [s.cut_of("layers.1.block_sparse_moe.experts.0.w2.weight_scale") for s in halves]
    assert [(c.start, c.stop) for c in packed] == [(0, 32), (32, 48)]
    assert [(c.start, c.stop) for c in scales] == [(0, 2), (2, 3)]
    assert halves[1].cut_of("layers.3.self_attn.kv_a_proj_with_mqa.weight") is None


def test_key_heads_are_shared_by_neighbours_where_there_are_fewer_than_ranks():
    """Catches queries that meet the key head of another group, and a layout that tears a group."""
    g = Gqa(heads=8, kv_heads=2, dim=16)
    assert [grouped_heads(g, 4, rank) for rank in range(4)] == [
        ((0, 2), (0, 1)),
        ((2, 4), (0, 1)),
        ((4, 6), (1, 2)),
        ((6, 8), (1, 2)),
    ]
    assert grouped_heads(g, 2, 1) == ((4, 8), (1, 2))
    with pytest.raises(Unavailable, match="2 key heads cannot be cut over 3 ranks"):
        grouped_heads(g, 3, 0)
    with pytest.raises(Unavailable):
        grouped_heads(dataclasses.replace(g, heads=2), 4, 0)
