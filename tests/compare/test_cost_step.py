"""Where work steps up: no tiling is accused, and a path that does the work twice is found at its threshold."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.compare.cost import CostLine, Costs, judge_costs
from day0check.compare.cost_step import NEAR, STEP, Steps, suspicions

SIZES = (32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448, 2048)


def line(size: int, done: float, *, sweep: str = "length", operator: str = "mla.attention") -> CostLine:
    """An operator whose model goes with the size and with its square, as attention over a prompt."""
    return CostLine(
        tap=f"layers.05.{operator}",
        operator=operator,
        layer=5,
        phase="prefill",
        sweep=sweep,
        size=size,
        order=7,
        calls=1,
        operations=640.0 * size * (size + 1),
        bytes=736.0 * size,
        done=done,
        moved=0.0,
        scratch=0.0,
        kept=0.0,
    )


def looked_for(work) -> list[CostLine]:
    """A sweep over `work` (a function of the size), narrowed as the worker narrows it."""
    lines, asked = [line(n, work(n)) for n in SIZES], []
    while (place := Steps(lines).next_size(asked)) is not None:
        asked.append(place)
        lines.append(line(place[1], work(place[1]), sweep=NEAR + place[0]))
    assert len(asked) <= 12
    return lines


def judged(lines):
    measures = judge_costs(Costs(tuple(lines), roof_bytes_per_second=1e10))
    return next(m for m in measures if m.operator == "mla.attention")


def tiled(n: int, width: int) -> int:
    return -(-n // width) * width


TILES = st.sampled_from([1, 8, 16, 32, 48, 64, 96, 128, 256, 512])


@settings(max_examples=60, deadline=None)
@given(TILES, TILES, TILES, st.floats(0, 1e7), st.floats(0, 1e4), st.floats(1, 1e3))
def test_no_tiling_is_suspicious(rows, keys, linear, start, per_row, per_pair):
    """Catches a law that takes the edge of a tile, a start-up cost or a part of lower order for a step."""
    lines = [line(n, start + per_row * tiled(n, linear) + per_pair * tiled(n, rows) * tiled(n, keys)) for n in SIZES]
    assert not suspicions(lines)
    assert judged(lines).passed


def test_weights_of_the_model_hide_no_growth():
    """Catches an alarm at work that goes with the size, where weights that are read once weigh more in the model."""
    lines = [dataclasses.replace(line(n, 900.0 * n), operations=0.0, bytes=50_000.0 + 700 * n) for n in SIZES]
    assert not suspicions(lines)


def falling(n: int) -> float:
    """Squares of blocks up to 256 keys, behind them what each block of 64 rows sees: work per unit falls by a half."""
    if n <= 256:
        return 2 * 640.0 * tiled(n, 64) * n
    return sum(2 * 640.0 * 64 * min(n, tiled(first + 64, 256)) for first in range(0, n, 64))


@pytest.mark.parametrize("threshold", [90, 200, 256, 300, 700, 1100])
def test_work_done_twice_is_found_where_it_begins(threshold):
    """Catches a step that hides in work per unit which falls by other causes, and a threshold told wrongly."""
    assert judged(looked_for(falling)).passed
    found = judged(looked_for(lambda n: falling(n) * (2 if n >= threshold else 1)))
    assert found.failing == "step_length"
    assert found.statistics["step_length"] == pytest.approx(2, rel=0.1)
    assert f"from size {threshold} on (at size {threshold - 1} not yet)" in found.message


def test_a_small_change_of_path_is_none_and_is_told():
    """Catches a law without room for a table that is shared up to some size and made anew beyond it."""
    found = judged(looked_for(lambda n: 800.0 * n * n * (1.3 if n > 64 else 1)))
    assert found.passed
    assert 1.25 < found.statistics["step_length"] < STEP


@pytest.mark.parametrize(("share", "passed"), [(0.005, True), (0.05, False)])
def test_a_step_of_what_takes_next_to_nothing_is_none(share, passed):
    """Catches an alarm at a gather of a few rows that has a path of its own for short ones."""
    lines = looked_for(lambda n: falling(n) * (2 if n >= 300 else 1))
    others = [line(x.size, x.done * (1 / share - 1), sweep=x.sweep, operator="head.logits") for x in lines]
    found = judged([*lines, *others])
    assert found.passed is passed
    assert passed or "% to the whole step" in found.message


def test_a_step_that_was_not_looked_for_is_not_judged():
    """Catches a record without the narrow sizes that passes because nobody looked."""
    lines = [line(n, falling(n) * (1.6 if n >= 256 else 1)) for n in SIZES]
    assert suspicions(lines)
    found = judged(lines)
    assert not found.passed
    assert found.failing or "between sizes 181 and 256" in found.not_judged


def test_a_suspicion_needs_two_sizes():
    """Catches a law that accuses one size alone, at which a tile ends badly."""
    work = [800.0 * n * n for n in SIZES]
    work[6] *= 1.9
    assert not suspicions([line(n, w) for n, w in zip(SIZES, work, strict=True)])
    assert math.isclose(judged([line(n, w) for n, w in zip(SIZES, work, strict=True)]).statistics["step_length"], 1.0)
