"""What an operator makes of one row is what it makes of that row among others: a CPU has other ways for one."""

import pytest
import torch

from day0check.accelerated.ops import TABLE


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(found: torch.Tensor, due: torch.Tensor) -> None:
    torch.testing.assert_close(found, due, rtol=2e-5, atol=2e-6)


def test_a_norm_and_a_mix_of_one_row():
    """Catches a factor that is not the row's own, an eps that is left out, a source that is."""
    x, w = drawn(5, 24) * 0.01, drawn(24, seed=2)
    sources, proj = drawn(5, 4, 24, seed=3), drawn(24, seed=4)
    many = TABLE["norm.rms"](x, weight=w, eps=1e-3)
    mixed = TABLE["residual.mix"](sources, norm_weight=w, proj=proj, eps=1e-3)
    for row in range(5):
        one = slice(row, row + 1)
        near(TABLE["norm.rms"](x[one], weight=w, eps=1e-3), many[one])
        near(TABLE["residual.mix"](sources[one], norm_weight=w, proj=proj, eps=1e-3), mixed[one])
    assert TABLE["norm.rms"](torch.full((1, 8), float("nan")), weight=None, eps=1e-6).isnan().all()


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2)])
def test_experts_of_one_row_are_those_of_the_row_among_others(groups, kept):
    """Catches a tie that falls to the higher number, weights of the biased scores, a NaN that is sorted anyhow."""
    draw = torch.Generator().manual_seed(5)
    scores = torch.randint(0, 5, (40, 16), generator=draw).float() / 4
    scores[7, 3], scores[8, 2] = float("nan"), float("inf")
    bias = torch.randint(0, 3, (16,), generator=draw).float() / 4
    given = {"bias": bias, "k": 3, "groups": groups, "kept_groups": kept, "renormalise": True, "scale": 2.0}
    ids, weights = TABLE["moe.route"](scores, **given)
    for row in range(len(scores)):
        mine, own = TABLE["moe.route"](scores[row : row + 1], **given)
        assert mine.tolist() == [ids[row].tolist()]
        torch.testing.assert_close(own, weights[row : row + 1], equal_nan=True)


def test_pairs_of_one_row_go_to_their_experts_and_come_back():
    """Catches weights that stay in the order of the choices while results lie in that of the experts."""
    x, ids, weights = drawn(1, 8), torch.tensor([[5, 0, 3]]), torch.tensor([[0.5, 2.0, 1.0]])
    pairs, order, active, offsets = TABLE["moe.dispatch"](x, ids=ids, experts=6)
    assert (order.tolist(), active.tolist(), offsets.tolist()) == ([1, 2, 0], [0, 3, 5], [0, 1, 2, 3])
    y = pairs * (1.0 + active).unsqueeze(1)
    near(TABLE["moe.combine"](y, order=order, weights=weights), x * (0.5 * 6 + 2.0 * 1 + 1.0 * 4))


@pytest.mark.parametrize("visible", [0, 1, 6, 7, 40, 50])
def test_keys_of_one_row_are_the_best_it_sees(visible):
    """Catches a hidden key, a tie or a NaN that is not told from an order, and fewer keys than are asked for."""
    for scores in (drawn(1, 50), drawn(1, 50).round(), drawn(1, 50).index_fill(1, torch.tensor([2]), float("nan"))):
        found = TABLE["dsa.select"](scores, k=6, visible=torch.tensor([visible]))
        among = TABLE["dsa.select"](scores.repeat(2, 1), k=6, visible=torch.tensor([visible] * 2))
        assert found.shape == (1, 6)
        assert sorted(found[0].tolist()) == sorted(among[0].tolist())


@pytest.mark.parametrize(("owner", "visible"), [(0, 9), (0, 4), (0, 0), (-1, 9)])
def test_attention_and_scores_of_one_row(owner, visible):
    """Catches a key behind those that are seen, a row of nobody, and values that are not the keys' own."""
    q, keys = drawn(1, 3, 8), drawn(1, 9, 1, 8, seed=2)
    given = {"keys": keys, "values": keys[..., :6], "scale": 0.4}
    one = TABLE["mla.attention"](q, **given, owner=torch.tensor([owner]), visible=torch.tensor([visible]))
    two = {"owner": torch.tensor([owner, owner]), "visible": torch.tensor([visible, visible])}
    near(one, TABLE["mla.attention"](q.repeat(2, 1, 1), **given, **two)[:1])
    scored = {"weights": drawn(1, 3), "keys": keys[:, :, 0], "scale": 0.3}
    mine = TABLE["dsa.score"](q, **scored, owner=torch.tensor([owner]))
    others = scored | {"weights": drawn(1, 3).repeat(3, 1)}
    near(mine, TABLE["dsa.score"](q.repeat(3, 1, 1), **others, owner=torch.tensor([owner, -1, owner]))[:1])


@pytest.mark.parametrize("page", [4, 6])
def test_a_row_goes_where_its_slot_is(page):
    """Catches a page and a place that are swapped, also where a page is no power of two, and a padding row's write."""
    pool, value = torch.zeros(5, page, 3), drawn(1, 3)
    TABLE["kv.write"](pool, value=value, slots=torch.tensor([3 * page + 2]))
    assert torch.equal(pool[3, 2], value[0])
    assert int(pool.count_nonzero()) == 3
    TABLE["kv.write"](pool, value=value, slots=torch.tensor([-1]))
    assert int(pool.count_nonzero()) == 3
    slots = TABLE["kv.slots"](
        torch.tensor([[4, 1, 2]]), owner=torch.tensor([0, -1]), positions=torch.tensor([page + 1, 5]), page=page
    )
    assert slots.tolist() == [page + 1, -1]
