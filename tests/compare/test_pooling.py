"""Guards the joining of decode steps: the joined call must say what the single calls said."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.compare.pooling import Seen, held, joined, signature
from day0check.compare.replay import Replay
from day0check.contracts import CONTRACTS
from day0check.contracts.hard_inputs import Draw
from day0check.probe.rows import RowMap


def seen(operator, arguments, order=0):
    contract = CONTRACTS[operator]
    results = Replay(contract, arguments).run()
    count = len(arguments[contract.args[0].name])
    return Seen(contract, arguments, results, RowMap(("a",), (0,) * count, tuple(range(count))), order, order)


def same_as_apart(calls):
    assert len({signature(c) for c in calls}) == 1
    replay, results = joined([held(c) for c in calls])
    for together, apart in zip(replay.run(), results, strict=True):
        assert torch.allclose(together.float(), apart.float(), rtol=1e-5, atol=1e-6)


@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=5), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_joined_calls_give_the_results_of_the_single_ones(sizes, seed):
    """Catches owners, offsets or pair numbers that are not shifted, for any batch sizes of the steps."""
    d = Draw(seed, torch.float32)
    weight = d.float32(8, 4)
    conv, scores, combine, attention = [], [], [], []
    for n in sizes:
        conv.append({"x": d.act(n, 8), "weight": weight, "state": d.act(n, 3, 8), "offsets": torch.arange(n + 1)})
        owner = torch.arange(n) - (torch.arange(n) == n - 1).long() * n  # the last row is padding: -1
        scores.append(
            {"q": d.act(n, 2, 4), "weights": d.float32(n, 2), "keys": d.act(n, 6, 4), "owner": owner, "scale": 0.5}
        )
        combine.append({"y": d.act(2 * n, 4), "order": d.shuffled(2 * n), "weights": d.float32(n, 2)})
        attention.append(
            {
                "q": d.act(n, 2, 4),
                "keys": d.act(n, 6, 1, 4),
                "values": d.act(n, 6, 1, 4),
                "owner": torch.arange(n),
                "visible": torch.arange(n) + 1,
                "scale": 0.5,
            }
        )
    for operator, calls in (
        ("kda.conv", conv),
        ("dsa.score", scores),
        ("moe.combine", combine),
        ("mla.attention", attention),
    ):
        same_as_apart([seen(operator, a, i) for i, a in enumerate(calls)])


def test_experts_are_joined_with_the_weights_of_each_step():
    """Catches steps judged with the workspace's content of another step."""
    d = Draw(3, torch.float32)
    calls = []
    for i, n in enumerate((2, 3)):
        weights = {"w1": d.act(2, 8, 4), "w3": d.act(2, 8, 4), "w2": d.act(2, 4, 8)}
        arguments = {"x": d.act(n, 4), "offsets": torch.tensor([0, 1, n]), **weights, "activation": "silu"}
        calls.append(held(seen("moe.experts", arguments, i)))
        for w in weights.values():
            w.zero_()
    same_as_apart(calls)


def test_a_weight_that_was_written_between_two_steps_keeps_them_apart():
    """Catches the first step judged with the weight of the second."""
    d = Draw(4, torch.float32)
    weight = d.act(8, 4)
    before = signature(seen("mla.query", {"x": d.act(2, 4), "weight": weight}))
    assert signature(seen("mla.query", {"x": d.act(3, 4), "weight": weight})) == before
    weight.mul_(2)
    assert signature(seen("mla.query", {"x": d.act(2, 4), "weight": weight})) != before
    with torch.inference_mode():
        uncounted = torch.zeros(8, 4)
    assert signature(seen("mla.query", {"x": d.act(2, 4), "weight": uncounted})) is None


def test_moves_writes_and_large_calls_wait_for_nothing():
    """Catches a write or a large call that is kept until its memory has changed."""
    d = Draw(5, torch.float32)
    assert signature(seen("embed.tokens", {"ids": d.integers(0, 9, 2), "weight": d.act(9, 4)})) is None
    large = {"x": d.act(600, 1024), "weight": d.act(2048, 1024)}
    assert signature(seen("mla.query", large)) is None


def test_a_call_with_padding_rows_is_not_joined():
    """Catches rows behind those of all requests that are taken for the first rows of the next call."""
    d = Draw(5, torch.float32)
    weight = d.float32(8, 4)

    def call(rows):
        return seen(
            "kda.conv", {"x": d.act(rows, 8), "weight": weight, "state": d.act(2, 3, 8), "offsets": torch.arange(3)}
        )

    assert signature(call(2)) is not None
    assert signature(call(4)) is None
