"""The statistics of one compute result: element bound, largest |z|, ratios of whole, rows, columns and tiles.

Legend: R rows, H heads, C channels. Limits are those of the method notes, section 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from day0check.compare.directions import (
    Known,
    best_explanation,
    parameter_statements,
    rounding_statements,
    slope_statements,
)
from day0check.compare.judgement import MOST_BAD, Judgement, beyond
from day0check.compare.noise import NoiseMap, as_matrix, group_spread, noise_map, ratio_limit
from day0check.compare.one_rounding import (
    BOUND,
    BOUND_UNROUNDED,
    ELEMENT_LIMIT,
    Expected,
    by_element,
    half_step,
    in_words,
    pattern_of,
    slope_message,
    wrong_rows,
)
from day0check.compare.rounding import FORMATS, round_nearest
from day0check.compare.slopes import tiles

WHOLE_LIMIT, GROUP_LIMIT, LARGE_TILE_LIMIT, Z_LIMIT = 1.1, 1.5, 1.25, 8.0
SMALL_TILE, LARGE_TILE = 16, 32  # sides; 32 x 32 = 1,024 elements
BENIGN_WHOLE = 0.85  # healthy results of several roundings stay below it; above it the parameters are estimated
LEAST_FREEDOM = 4.0  # below it a ratio says nothing
NEAREST = 0.5  # variance of nearest over random rounding


def judge_result(
    candidate: torch.Tensor, expected: Expected, *, keep: torch.Tensor | None = None, thorough: bool = True
) -> Judgement:
    """Judges a candidate's result [rows, ...] of any float dtype.

    `keep`: bool [rows], rows that count (padding does not). `thorough`: parameters are estimated even where nothing is
    conspicuous. Non-finite values come first, then either the element
    bound (one final rounding, or none) or |z|, ratios, slopes and directions (several roundings).
    """
    if tuple(candidate.shape) != tuple(expected.oracle.shape):
        return _misshapen(candidate, expected.oracle)
    y, o = as_matrix(candidate.detach().to(torch.float64)), as_matrix(expected.oracle)
    floor = torch.nan_to_num(as_matrix(expected.floor.expand(expected.oracle.shape))).clamp_(min=2.0**-126)
    wrong, usable = _non_finite(y, o, expected.out_dtype)
    if keep is not None:
        wrong, usable = wrong & keep[:, None, None], usable & keep[:, None, None]
    rows, elements = int(y.shape[0]), int(y.numel())
    if bool(wrong.any()):
        at = wrong.nonzero()
        first = y[tuple(at[0])]
        pattern = "not a number" if bool(torch.isnan(first)) else "infinite" if torch.isinf(first) else "finite"
        count = float(len(at))
        return Judgement(
            rows,
            elements,
            {"non_finite": count},
            {"non_finite": 0.0},
            "non_finite",
            int(at[0, 0]),
            pattern=pattern,
            message=f"{int(count)} values are {pattern} where the reference is not",
            bad=tuple(at[:, 0].unique()[:MOST_BAD].tolist()),
        )
    if not bool(usable.any()):
        return Judgement(rows, elements)
    error = torch.where(usable, y - o, torch.zeros_like(y))
    o = torch.where(usable, o, torch.zeros_like(o))
    if expected.replicates:
        return _by_ratio(y, o, error, floor, usable, expected, thorough)
    return by_element(y, o, error, floor, usable, expected, thorough)


def _misshapen(candidate: torch.Tensor, oracle: torch.Tensor) -> Judgement:
    return Judgement(
        int(candidate.shape[0]) if candidate.dim() else 1,
        int(candidate.numel()),
        {"shape": 1.0},
        {"shape": 0.0},
        "shape",
        pattern="wrong shape",
        message=f"shape {list(candidate.shape)} where {list(oracle.shape)} is due",
    )


def _non_finite(y: torch.Tensor, o: torch.Tensor, out_dtype: str | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(elements whose class differs from the oracle's, elements that are finite on both sides)."""
    largest = FORMATS[out_dtype or "float32"].largest
    if float(y.abs().max()) < float("inf") and float(o.abs().max()) < largest:  # false for NaN
        every = torch.ones_like(y, dtype=torch.bool)
        return ~every, every
    finite = torch.isfinite(y) & torch.isfinite(o)
    same = finite | (torch.isnan(y) & torch.isnan(o)) | (y == o)
    overflow = torch.isinf(y) & (o.abs() >= largest * (1 - 2.0**-9)) & (torch.sign(y) == torch.sign(o))
    return ~(same | overflow), finite & (o.abs() < largest)


@dataclass(frozen=True)
class _Groups:
    """Mean squares of one kind of group: candidate [G], replicates [K, G], elements behind each [G]."""

    own: torch.Tensor
    replicates: torch.Tensor
    count: torch.Tensor
    least: float


def _by_ratio(
    y: torch.Tensor,
    o: torch.Tensor,
    error: torch.Tensor,
    floor: torch.Tensor,
    usable: torch.Tensor,
    expected: Expected,
    thorough: bool,
) -> Judgement:
    """Several roundings: |z| and ratios against the replicates' own spread; quiet elements by the float32 floor."""
    replicates = [as_matrix(r) for r in expected.replicates]
    replicates = [torch.where(usable & torch.isfinite(r), r, o) for r in replicates]
    noise = _noise(o, replicates, floor, usable, expected)
    z2 = error.square() / noise.variance
    statistics, limits = {"z": float(z2.max().sqrt())}, {"z": Z_LIMIT}
    quiet = noise.quiet & usable
    if bool(quiet.any()):
        half = half_step(torch.where(usable, y, o), o, expected.out_dtype)
        bound = (BOUND_UNROUNDED if expected.out_dtype is None else BOUND) * floor
        element = ((error.abs() - half) / bound).clamp_(min=0)
        statistics["element"] = float(element[quiet].max())
        limits["element"] = ELEMENT_LIMIT
    counted = distinct_rows(y, o)[:, None, None] & usable & ~noise.quiet
    bad_rows: dict[str, torch.Tensor] = {}
    freedom = {}
    for name, groups in _all_groups(z2, noise, counted).items():
        alike = 1.0 if name == "row" else expected.alike
        freedom[name] = _judge_groups(name, groups, statistics, limits, bad_rows, alike=alike)
    whole_freedom = min((f for f in freedom.values() if f > 0), default=0.0)
    power = _judge_whole(z2, noise, counted, whole_freedom, o, statistics, limits)
    failing = beyond(statistics, limits)
    known = _known(o, error, noise, counted, replicates, expected)
    statements = slope_statements(known)
    if thorough or failing or any(s.beyond for s in statements) or statistics.get("whole", 0.0) > BENIGN_WHOLE:
        statements += parameter_statements(known, expected.parameters)
        statements += rounding_statements(known, expected.unclaimed)
    for statement in statements:
        statistics[statement.key], limits[statement.key] = statement.significance, statement.limit
        if statement.key.startswith("direction"):
            statistics[statement.key.replace("direction", "error", 1)] = abs(statement.amplitude)
    powers = [p for p in (power, *(s.power for s in statements if s.key == "slope")) if p is not None]
    judged = Judgement(y.shape[0], y.numel(), statistics, limits, power=min(powers, default=None))
    if not beyond(statistics, limits):
        return judged
    told = best_explanation(statements, float(z2[counted].sum()) - float(counted.sum()))
    if not failing:
        chosen = next(s for s in statements if s.key == beyond(statistics, limits))
        told = told if told is not None and told.beyond else chosen
        return replace(judged, failing=told.key, row=told.row, pattern=told.pattern, message=slope_message(told))
    bad = z2 > Z_LIMIT**2
    if "element" in limits and statistics["element"] > ELEMENT_LIMIT:
        bad |= quiet & (element > ELEMENT_LIMIT)
    row, pattern = _address(failing, bad, z2, bad_rows)
    message = (
        f"the error ({pattern}) is {statistics[failing]:.3g} in '{failing}' where the claimed precision "
        f"explains {limits[failing]:.3g}"
    )
    words = {"failing": failing, "row": row, "pattern": pattern, "message": message + in_words(told)}
    return replace(judged, **words, **wrong_rows(bad, z2.sqrt()))


def _usable(variance: torch.Tensor | None, usable: torch.Tensor) -> torch.Tensor | None:
    """A known variance, zero in rows whose inputs are not finite."""
    return None if variance is None else torch.where(usable, torch.nan_to_num(as_matrix(variance)), 0.0)


def _noise(
    o: torch.Tensor, replicates: list[torch.Tensor], floor: torch.Tensor, usable: torch.Tensor, expected: Expected
) -> NoiseMap:
    internal, least = (_usable(v, usable) for v in (expected.internal, expected.least))
    return noise_map(
        o,
        replicates,
        floor=floor,
        out_dtype=expected.out_dtype,
        internal=internal,
        least=least,
        weights_of=dict(expected.groups).get("expert"),
    )


def _known(
    o: torch.Tensor,
    error: torch.Tensor,
    noise: NoiseMap,
    counted: torch.Tensor,
    replicates: list[torch.Tensor],
    expected: Expected,
) -> Known:
    def nearest_error() -> torch.Tensor:
        y = as_matrix(expected.nearest())
        if expected.out_dtype is not None:
            y = round_nearest(y, expected.out_dtype)
        return torch.where(counted, torch.nan_to_num(y - o), 0.0)

    return Known(
        error,
        o,
        noise,
        counted,
        [r - o for r in replicates],
        None if expected.nearest is None else nearest_error,
        expected.groups,
        expected.coupled,
        expected.alike,
    )


def distinct_rows(y: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """bool [R]: the first of every set of rows whose candidate and oracle values are both the same.

    Repeated input rows repeat their error, so a column of them is no longer a sum of independent errors.
    """
    if y.shape[0] < 2:
        return torch.ones(y.shape[0], dtype=torch.bool, device=y.device)
    lanes = torch.cat([y.reshape(y.shape[0], -1).float(), o.reshape(o.shape[0], -1).float()], 1).contiguous()
    weights = torch.arange(1, lanes.shape[1] + 1, device=y.device) * 0x9E3779B97F4A7C1 | 1
    keys = (lanes.view(torch.int32).to(torch.int64) * weights).sum(1)
    _, inverse = torch.unique(keys, return_inverse=True)
    first = torch.full((int(inverse.max()) + 1,), y.shape[0], dtype=torch.int64, device=y.device)
    places = torch.arange(y.shape[0], device=y.device)
    first.scatter_reduce_(0, inverse, places, "amin")
    kept = torch.zeros(y.shape[0], dtype=torch.bool, device=y.device)
    kept[first] = True
    return kept


def _all_groups(z2: torch.Tensor, noise: NoiseMap, counted: torch.Tensor) -> dict[str, _Groups]:
    weight = counted.to(z2.dtype)
    stack = torch.cat([z2.unsqueeze(0), noise.spread]) * weight
    groups = {
        "row": _grouped(stack.sum(-1), weight.sum(-1), GROUP_LIMIT),
        "column": _grouped(stack.sum(1), weight.sum(0), GROUP_LIMIT),
    }
    if z2.shape[1] > 1:
        groups["head"] = _grouped(stack.sum((1, 3)), weight.sum((0, 2)), GROUP_LIMIT)
    for name, side, least in (("tile", SMALL_TILE, GROUP_LIMIT), ("tile_1024", LARGE_TILE, LARGE_TILE_LIMIT)):
        if z2.shape[0] >= 2 * side and z2.shape[1] * z2.shape[2] >= 2 * side:
            groups[name] = _grouped(tiles(stack, side), tiles(weight.unsqueeze(0), side)[0], least)
    return groups


def _grouped(sums: torch.Tensor, count: torch.Tensor, least: float) -> _Groups:
    sums, count = sums.reshape(sums.shape[0], -1), count.reshape(-1)
    filled = count > 0
    means = sums[:, filled] / count[filled]
    return _Groups(means[0], means[1:], count[filled], least)


def _judge_groups(
    name: str,
    groups: _Groups,
    statistics: dict[str, float],
    limits: dict[str, float],
    bad_rows: dict[str, torch.Tensor],
    *,
    alike: float = 1.0,
) -> float:
    """Adds the group's worst ratio and, where it has the degrees of freedom, its limit. Returns those of the whole.
    `alike`: so many rows of a group err as one."""
    if not groups.own.numel():
        return 0.0
    most = float(groups.count.max())
    spread = group_spread(groups.replicates, most)
    if float(spread.moderated.min()) <= 0:
        return 0.0
    ratio = (groups.own / spread.moderated).sqrt()
    share = groups.count / most
    statistics[name] = float(ratio.max())
    limit = torch.full_like(ratio, float("inf"))
    for size in (1.0, 0.5, 0.25, 0.125):  # smaller groups have fewer degrees of freedom; rounded down to these shares
        freedom = spread.freedom / alike * size
        here = (share >= size) & torch.isinf(limit)
        if freedom >= LEAST_FREEDOM and bool(here.any()):
            least = groups.least if size == 1.0 else max(groups.least, GROUP_LIMIT)
            denominator = spread.denominator_freedom - spread.freedom * len(groups.replicates) * (1 - size)
            limit[here] = ratio_limit(freedom, denominator, least)
    over = ratio / limit
    at = int(over.argmax())
    if bool(torch.isfinite(limit[at])):
        statistics[name], limits[name] = float(ratio[at]), float(limit[at])
    bad_rows[name] = over > 1
    return spread.freedom / alike * len(ratio)


def _judge_whole(
    z2: torch.Tensor,
    noise: NoiseMap,
    counted: torch.Tensor,
    freedom: float,
    o: torch.Tensor,
    statistics: dict[str, float],
    limits: dict[str, float],
) -> float | None:
    """Adds the ratio of everything; returns the smallest factor on everything that ratio or |z| would have shown."""
    if not bool(counted.any()):
        return None
    every = bool(counted.all())
    own = float((z2 if every else z2[counted]).mean())
    replicates = float((noise.spread if every else noise.spread[:, counted]).mean())
    if replicates <= 0:
        return None
    statistics["whole"] = (own / replicates) ** 0.5
    size2 = o.square() / noise.variance
    size2 = size2 if every else size2[counted]
    powers = [Z_LIMIT / float(size2.max()) ** 0.5] if float(size2.max()) > 0 else []
    if freedom >= LEAST_FREEDOM:
        limit = ratio_limit(freedom, freedom * len(noise.spread), WHOLE_LIMIT)
        limits["whole"] = limit
        if float(size2.mean()) > 0:
            powers.append((max(limit**2 - NEAREST, 0.0) * replicates / float(size2.mean())) ** 0.5)
    return min(powers) if powers else None


def _address(failing: str, bad: torch.Tensor, z2: torch.Tensor, bad_groups: dict[str, torch.Tensor]) -> tuple[int, str]:
    """Lowest row beyond its limit and the pattern; the row of the largest |z| where no single row stands out."""
    if bool(bad.any()):
        rows = bad.any(-1).any(-1).nonzero().flatten()
        pattern = pattern_of(bad)
    else:
        rows = z2.amax((1, 2)).argmax().reshape(1)
        pattern = {"column": "some columns", "head": "some heads", "whole": "everywhere", "row": "some rows"}.get(
            failing, "one tile"
        )
        if failing in ("row", "column", "head") and int(bad_groups[failing].sum()) == 1:
            pattern = f"one {failing}"
        if failing == "row" and bad_groups["row"].numel() == z2.shape[0] * z2.shape[1]:
            rows = bad_groups["row"].reshape(z2.shape[0], z2.shape[1]).any(1).nonzero().flatten()
    return int(rows[0]), pattern
