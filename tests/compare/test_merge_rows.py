"""Rows that are laid over ranks are each on one rank."""

import pytest

from day0check.compare.merge_rows import row_measures


def line(tap, rows, *, dims="rows@tp, ...", result=0, step=3):
    owner = tuple(-1 if row is None else 0 for row in rows)
    position = tuple(-1 if row is None else row for row in rows)
    names = {"tap": tap, "operator": "residual.add", "phase": "prefill", "step": step, "order": 7}
    return {**names, "result": result, "dims": dims, "owner": owner, "position": position, "requests": ("a",)}


WHOLE = ((0, line("embed.tokens", (4, 5, 6, None), dims="")), (1, line("embed.tokens", (4, 5, 6, None), dims="")))


def on(first, second, tap="layers.02.residual.add.mlp", **rest):
    return [(0, line(tap, first, **rest)), (1, line(tap, second, **rest))]


def test_rows_of_healthy_ranks_raise_nothing():
    """Catches an alarm over padding, over rows that nobody wanted, over a rank without rows and over pairs of experts;
    and a result that is laid over ranks and has no judgement."""
    calls = [WHOLE, on((4, 5), (6, None)), on((4, 5, 6), ()), on((), (6,), tap="residual.mix.output")]
    found = row_measures([*calls, on((4,), (4,), dims="pairs@ep, ...", tap="layers.02.moe.experts")])
    assert [(m.tap, m.passed, m.layer) for m in found] == [
        ("layers.02.residual.add.mlp.ranks", True, 2),
        ("residual.mix.output.ranks", True, None),
    ]


@pytest.mark.parametrize(
    ("first", "second", "pattern", "position", "rank"),
    [
        ((4, 5), (5, 6), "a row on several ranks", 5, 1),
        ((4,), (6,), "a row on no rank", 5, None),
    ],
)
def test_a_row_that_is_lost_or_held_twice_is_told(first, second, pattern, position, rank):
    """Catches a row that no rank has, which no oracle asks for, and one that two ranks go on with."""
    wrong = [m for m in row_measures([WHOLE, on((4, 5), (6,)), on(first, second)]) if not m.passed]
    (found,) = wrong
    assert (found.pattern, found.request, found.position, found.rank) == (pattern, "a", position, rank)
    assert (found.kind, found.failing, found.statistics) == ("move", "misplaced_rows", {"misplaced_rows": 1.0})
