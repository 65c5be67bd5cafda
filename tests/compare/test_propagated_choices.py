"""Choices in units of score noise: what is legal, what is not, and that the units are those of the replicates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.compare.propagated_choices import FORMS, LIMIT, judge_route, judge_selection
from reference.attention import select
from reference.moe import route

NOISE = 0.01
seeds = st.integers(0, 2**31)


def scores_and_replicates(seed: int, rows: int, n: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Generator]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, n, generator=generator, dtype=torch.float64)
    replicates = [scores + NOISE * torch.randn(rows, n, generator=generator, dtype=torch.float64) for _ in range(2)]
    return scores, replicates, generator


@settings(max_examples=30, deadline=None)
@given(seed=seeds, n=st.integers(1, 40), k=st.integers(1, 12), threshold=st.sampled_from([None, 0.0, 0.8]))
def test_selection_by_noisy_scores_is_legal(seed, n, k, threshold):
    """Would catch a false alarm over flips that the noise explains, with any number of keys and of visible ones."""
    scores, replicates, generator = scores_and_replicates(seed, 24, n)
    visible = torch.randint(0, n + 1, (24,), generator=generator)
    noisy = scores + NOISE * torch.randn(scores.shape, generator=generator, dtype=torch.float64)
    chosen = select(noisy, k=k, visible=visible, threshold=threshold).long()
    shuffled = chosen[:, torch.randperm(chosen.shape[1], generator=generator)]
    judged = judge_selection(scores, replicates, shuffled, visible, k=k, threshold=threshold)
    assert judged.form.tolist() == [0] * 24
    assert bool(judged.legal.all())
    exact = select(scores, k=k, visible=visible, threshold=threshold).long()
    assert float(judge_selection(scores, replicates, exact, visible, k=k, threshold=threshold).regret.max()) == 0.0


@settings(max_examples=30, deadline=None)
@given(seed=seeds, gap=st.floats(12, 200))
def test_regret_is_the_distance_in_noises(seed, gap):
    """Would catch units that are not those of the replicates' own errors."""
    scores, _, generator = scores_and_replicates(seed, 40, 16)
    scores = torch.where(scores.argsort(-1).argsort(-1) >= 8, 0.0, -gap * NOISE) + 1e-9 * scores
    replicates = [scores + NOISE * torch.randn(scores.shape, generator=generator, dtype=torch.float64) for _ in "ab"]
    chosen = scores.topk(8).indices.clone()
    chosen[3, 0] = scores[3].argmin()
    judged = judge_selection(scores, replicates, chosen, torch.full((40,), 16), k=8)
    assert float(judged.regret[3]) == pytest.approx(gap, rel=0.5)
    assert not bool(judged.legal[3]) or gap < 2 * LIMIT
    assert int(judged.flips.sum()) == 1


@pytest.mark.parametrize(
    ("chosen", "form"),
    [
        ([0, 1, 9], "out of range"),
        ([0, 1, -2], "out of range"),
        ([0, 1, 4], "selects the future"),
        ([0, 1, 1], "duplicate"),
        ([0, 1, -1], "wrong count"),
        ([0, 1, 2, 3], "wrong count"),
        ([2, -1, 1, 0], None),
    ],
)
def test_forms_of_a_selection(chosen, form):
    """Would catch an index list of the wrong form being replayed into the oracle."""
    scores, replicates, _ = scores_and_replicates(0, 1, 6)
    judged = judge_selection(scores, replicates, torch.tensor([chosen]), torch.tensor([4]), k=3)
    assert (FORMS[int(judged.form) - 1] if int(judged.form) else None) == form


@settings(max_examples=30, deadline=None)
@given(seed=seeds, groups=st.sampled_from([(1, 1), (4, 2), (4, 3), (8, 4)]), k=st.integers(1, 4))
def test_routes_by_noisy_scores_are_legal(seed, groups, k):
    """Would catch a false alarm over groups and experts that were nearly equal, or where a kept group gave none."""
    scores, replicates, generator = scores_and_replicates(seed, 64, 16)
    noisy = scores + NOISE * torch.randn(scores.shape, generator=generator, dtype=torch.float64)
    options = {"k": k, "groups": groups[0], "kept_groups": groups[1]}
    ids, _ = route(noisy, bias=None, renormalise=True, scale=1.0, **options)
    judged = judge_route(scores, replicates, ids, **options)
    assert bool(judged.legal.all()), float(judged.regret.max())


def test_wrong_groups_and_experts_are_not_legal():
    """Would catch a router that ignores its groups, or takes the worst experts of the right ones."""
    scores, replicates, _ = scores_and_replicates(5, 64, 16)
    options = {"k": 4, "groups": 4, "kept_groups": 2}
    free = scores.topk(4).indices
    judged = judge_route(scores, replicates, free, **options)
    spread = (free // 4).sort(-1).values
    many = (spread[:, 1:] != spread[:, :-1]).sum(-1) + 1 > 2
    assert bool(many.any())
    assert {FORMS[f - 1] for f in judged.form[many].tolist()} == {"too many groups"}
    worst = (-scores).topk(4).indices
    assert not bool(judge_route(scores, replicates, worst, **options).legal.any())
    right, _ = route(scores, bias=None, renormalise=True, scale=1.0, **options)
    kept = torch.zeros(64, 4, dtype=torch.bool).scatter(1, right // 4, True)
    other = scores.view(64, 4, 4).sum(-1).masked_fill(kept, -torch.inf).argmax(-1)
    wrong = other.unsqueeze(-1) * 4 + torch.arange(4)
    assert float(judge_route(scores, replicates, wrong, **options).legal.double().mean()) < 0.1
