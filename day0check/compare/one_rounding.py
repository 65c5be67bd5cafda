"""Results with one final rounding, or none: the element bound, and the slopes of what stays inside it.

Legend: R rows, H heads, C channels. Source: method notes, section 1, items 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from day0check.compare.directions import (
    Known,
    Parameter,
    Statement,
    Unclaimed,
    best_explanation,
    parameter_statements,
    slope_statements,
)
from day0check.compare.judgement import MOST_BAD, Judgement, beyond
from day0check.compare.noise import NoiseMap
from day0check.compare.rounding import FORMATS, round_nearest, ulp

ELEMENT_LIMIT = 1.0
# The element bound B in units of the float32 floor: 2 sqrt(K) against sqrt(K) / 8 where the result is rounded, so that
# only values next to a midpoint meet it. Raw float32 results meet it always: one product after another, of float32
# factors, reaches 2.7 sqrt(K) in a few thousand elements.
BOUND, BOUND_UNROUNDED = 16.0, 48.0
POWER_ELEMENTS = 2**15


@dataclass(frozen=True)
class Expected:
    """What a result is judged by. oracle, floor and replicates share the candidate's shape [rows, ...], float64.

    `floor`: standard deviation that float32 sums may add. `replicates`: results before the output rounding, under
    random rounding of the inner points; empty when only the output is rounded. `out_dtype`: None = not rounded.
    `internal`: variance of the inner roundings where it is known from a formula, `least` that of the last of them.
    `nearest`: gives the result before the output rounding with inner points rounded to nearest. The others are as in
    `directions.py`.
    """

    oracle: torch.Tensor
    floor: torch.Tensor
    out_dtype: str | None
    replicates: tuple[torch.Tensor, ...] = ()
    internal: torch.Tensor | None = None
    least: torch.Tensor | None = None
    nearest: Callable[[], torch.Tensor] | None = None
    parameters: tuple[Parameter, ...] = ()
    unclaimed: tuple[Unclaimed, ...] = ()
    groups: tuple[tuple[str, torch.Tensor], ...] = ()
    coupled: bool = False
    alike: float = 1.0


def half_step(y: torch.Tensor, o: torch.Tensor, out_dtype: str | None) -> torch.Tensor:
    """How far from a result y the exact value may lie for y to be its nearest: half the gap on the oracle's side.

    The gap towards zero below a power of two is half of that above it.
    """
    dtype = out_dtype or "float32"
    step = ulp(y.contiguous(), dtype)
    power_of_two = (y.abs() == step * 2.0 ** (FORMATS[dtype].bits - 1)) & (
        y.abs() > 2.0 ** FORMATS[dtype].smallest_exponent
    )
    return torch.where(power_of_two & (o.abs() < y.abs()), step / 4, step / 2)


def by_element(
    y: torch.Tensor,
    o: torch.Tensor,
    error: torch.Tensor,
    floor: torch.Tensor,
    usable: torch.Tensor,
    expected: Expected,
    thorough: bool,
) -> Judgement:
    """One final rounding or none: |e| <= ulp / 2 + B, no statistics needed. Slopes see what stays inside B, where many
    terms cancel; of a result that the bound refuses they give the words."""
    out_dtype = expected.out_dtype
    bound = (BOUND_UNROUNDED if out_dtype is None else BOUND) * floor
    every = bool(usable.all())
    half = half_step(y if every else torch.where(usable, y, o), o, out_dtype)
    element = (error.abs() - half).div_(bound).clamp_(min=0)
    if not every:
        element.masked_fill_(~usable, 0.0)
    worst = float(element.max())
    statistics = {"element": worst}
    if out_dtype is not None:
        variance = ulp(o.contiguous(), out_dtype).square() / 6 + floor.square()
        z2 = error.square() / variance
        statistics["whole"] = float((z2 if every else z2[usable]).mean().sqrt())
        statistics["z"] = float(z2.max().sqrt())
    limits = {"element": ELEMENT_LIMIT}
    power = _element_power(o, bound, half, usable, out_dtype)
    slopes = []
    if out_dtype is not None and (thorough or worst > ELEMENT_LIMIT):
        slopes = _beside_nearest(o, error, floor, usable, expected)
        statistics |= {s.key: s.significance for s in slopes}
        limits |= {s.key: s.limit for s in slopes}
    power = min((p for p in (power, *(s.power for s in slopes if s.key == "slope")) if p), default=None)
    if worst <= ELEMENT_LIMIT:
        return _within(Judgement(y.shape[0], y.numel(), statistics, limits, power=power), slopes)
    bad = element > ELEMENT_LIMIT
    pattern = pattern_of(bad)
    return Judgement(
        y.shape[0],
        y.numel(),
        statistics,
        limits,
        "element",
        int(bad.any(-1).any(-1).nonzero()[0]),
        pattern=pattern,
        message=f"{int(bad.sum())} of {int(usable.sum())} values are further from the exact result than one rounding "
        f"and float32 sums explain ({pattern}); the worst by {worst:.3g} times the bound"
        + in_words(_explained(o, error, floor, usable, expected)),
        power=power,
        **wrong_rows(bad, element),
    )


def wrong_rows(bad: torch.Tensor, size: torch.Tensor) -> dict[str, tuple]:
    """`bad` and `sizes` of a judgement from elements [R, H, C] that are beyond a limit, and how far each is."""
    rows = bad.any(-1).any(-1).nonzero().flatten()[:MOST_BAD]
    return {"bad": tuple(rows.tolist()), "sizes": tuple(size[rows].amax((1, 2)).double().tolist())}


def _beside_nearest(
    o: torch.Tensor, error: torch.Tensor, floor: torch.Tensor, usable: torch.Tensor, expected: Expected
) -> list[Statement]:
    """The factors that are in a result beyond those that rounding to nearest leaves in it."""
    nearest = torch.where(usable, round_nearest(o, expected.out_dtype) - o, 0.0)
    return slope_statements(_one_rounding(o, error, floor, usable, expected, nearest), always_nearest=True)


def _within(judgement: Judgement, slopes: list[Statement]) -> Judgement:
    """A result within its element bound, refused where a factor is in it all the same."""
    failing = beyond(judgement.statistics, judgement.limits)
    if not failing:
        return judgement
    told = next(s for s in slopes if s.key == failing)
    return replace(judgement, failing=failing, row=told.row, pattern=told.pattern, message=slope_message(told))


def slope_message(told: Statement) -> str:
    return (
        f"{told.text()}: {told.significance:.3g} times the spread that the claimed precision explains, "
        f"the limit is {told.limit:.3g}"
    )


def _one_rounding(
    o: torch.Tensor,
    error: torch.Tensor,
    floor: torch.Tensor,
    usable: torch.Tensor,
    expected: Expected,
    nearest: torch.Tensor | None = None,
) -> Known:
    variance = floor.square()
    if expected.out_dtype is not None:
        variance = variance + ulp(o.contiguous(), expected.out_dtype).square() / 6
    noise = NoiseMap(variance, variance.new_zeros(0), ~usable, torch.zeros_like(variance))
    asked = None if nearest is None else lambda: nearest
    return Known(error, o, noise, usable, nearest=asked, groups=expected.groups, coupled=expected.coupled)


def _explained(
    o: torch.Tensor, error: torch.Tensor, floor: torch.Tensor, usable: torch.Tensor, expected: Expected
) -> Statement | None:
    """The factor or parameter behind errors beyond the element bound, if one explains them."""
    known = _one_rounding(o, error, floor, usable, expected)
    statements = slope_statements(known) + parameter_statements(known, expected.parameters)
    z2 = (error.square() / known.noise.variance)[usable]
    return best_explanation(statements, float(z2.sum()) - float(usable.sum()))


def in_words(statement: Statement | None) -> str:
    return "" if statement is None else f"; {statement.text()}"


def _element_power(
    o: torch.Tensor, bound: torch.Tensor, half: torch.Tensor, usable: torch.Tensor, out_dtype: str | None
) -> float | None:
    """Smallest factor 1 + eps on everything that must show: some element crosses its next midpoint by more than B.

    Of large results a part of the rows is looked at: more rows could only see more.
    """
    every = -(-o.numel() // POWER_ELEMENTS)
    if every > 1:
        o, bound, half, usable = (t[::every] for t in (o, bound, half, usable))
    size = o.abs()
    counted = usable & (size > 0)
    if out_dtype is not None:
        step = ulp(o.contiguous(), out_dtype)
        place = size / step
        place = place - place.floor()
        to_midpoint = torch.where(place < 0.5, 0.5 - place, 1.5 - place) * step
    else:
        to_midpoint = half
    least = float(torch.where(counted, (to_midpoint + bound) / size, torch.inf).min())
    return least if least < torch.inf else None


def pattern_of(bad: torch.Tensor) -> str:
    """Where bad elements [R, H, C] lie, in words that do not depend on numbers."""
    flat = bad.reshape(bad.shape[0], -1)
    in_rows, in_columns = flat.any(1), flat.any(0)
    rows, columns = int(in_rows.sum()), int(in_columns.sum())
    if flat.shape == (1, 1):
        return "everywhere"
    if int(flat.sum()) == 1:
        return "one element"
    if rows == 1 and flat.shape[0] > 1:
        return "one row"
    if columns == 1 and flat.shape[1] > 1:
        return "one column"
    at_rows, at_columns = in_rows.nonzero().flatten(), in_columns.nonzero().flatten()
    height, width = int(at_rows[-1] - at_rows[0]) + 1, int(at_columns[-1] - at_columns[0]) + 1
    if 4 * height <= flat.shape[0] and 4 * width <= flat.shape[1]:
        return "one tile"
    if 8 * rows <= flat.shape[0]:
        return "some rows"
    if 8 * columns <= flat.shape[1]:
        return "some columns"
    return "everywhere"
