"""Projections: how much of the error is a multiple of something, in units of what the claimed roundings make of it.

The slope is the projection of the error on the oracle itself (a factor on the result); a named direction is that on the
change of the result with a parameter (an error of the parameter). Both see far below a ratio, because the noise of all
elements of a group averages out. Legend: R rows, H heads, C channels, K replicates, G groups. Source: method notes,
"The statistics of a compute operator", items 3 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from day0check.compare.noise import NoiseMap, group_spread, ratio_limit

FAMILY_LIMIT, WHOLE_LIMIT = 10.0, 6.0  # in spreads: rows, columns and tiles; sums over rows
LEAST_PARAMETER = 1e-3  # relative error of a parameter below which a direction says nothing
OF_NEAREST = 1.5  # how far beyond the projection of nearest rounding a legal order of roundings may lie
TILE = 16
OWN, NEAREST, REPLICATES, SQUARE, INNER = 0, 1, slice(2, -2), -2, -1  # lanes


@dataclass(frozen=True)
class Lanes:
    """Sums over the channels of each row and head, over the rows of each column, over tiles: [K + 4, R, H],
    [K + 4, H, C] and [K + 4, rows of tiles, columns of tiles] (None where there are less than two by two).

    The lanes: error x direction / variance of the candidate, of a candidate that rounds to nearest everywhere (zeros
    until asked for), of the replicates; then direction^2 / variance, which is the variance of the first if errors were
    independent, and its share that inner roundings make.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    tiles: torch.Tensor | None


@dataclass(frozen=True)
class Projection:
    """The projections of one family of groups: relative `amplitude` [G], its `spread` [G], the `limit` [G] on how many
    spreads noise explains, and the `significance` [G]: how many spreads the amplitude is beyond rounding to
    nearest.

    Rounding to nearest is biased where the values are not spread evenly between their neighbours (a softmax close to
    one, a norm whose root is almost a power of two); an implementation that rounds there may have that bias, or none.
    """

    amplitude: torch.Tensor
    spread: torch.Tensor
    limit: torch.Tensor
    significance: torch.Tensor

    def worst(self) -> int:
        """The group furthest beyond its limit."""
        return int((self.significance / self.limit).argmax())


def lanes(
    error: torch.Tensor,
    deviations: list[torch.Tensor],
    direction: torch.Tensor,
    *,
    noise: NoiseMap,
    counted: torch.Tensor,
) -> Lanes:
    """Lanes of a candidate's error [R, H, C] and the replicates' deviations before the output rounding, all float64."""
    weight = torch.where(counted, direction / noise.variance, 0.0)
    stack = torch.stack([error, *deviations, direction, weight * noise.inner])
    stack *= weight
    large = stack.shape[1] >= 2 * TILE and stack.shape[2] * stack.shape[3] >= 2 * TILE

    def laid(sums: torch.Tensor) -> torch.Tensor:
        return torch.cat([sums[:1], torch.zeros_like(sums[:1]), sums[1:]])

    return Lanes(laid(stack.sum(-1)), laid(stack.sum(1)), laid(tiles(stack, TILE)) if large else None)


def tiles(x: torch.Tensor, side: int) -> torch.Tensor:
    """Sums over side x side tiles of [S, R, H, C], heads side by side; edge tiles are smaller."""
    flat = x.reshape(x.shape[0], 1, x.shape[1], -1)
    below, right = -flat.shape[2] % side, -flat.shape[3] % side
    flat = torch.nn.functional.pad(flat, (0, right, 0, below))
    return torch.nn.functional.avg_pool2d(flat, side).squeeze(1) * side**2


def with_nearest(own: Lanes, nearest: Lanes) -> Lanes:
    """The lanes of a candidate beside those of one that rounds to nearest, made by the same function."""

    def joined(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.cat([a[:1], b[:1], a[2:]])

    both = None if own.tiles is None else joined(own.tiles, nearest.tiles)
    return Lanes(joined(own.rows, nearest.rows), joined(own.columns, nearest.columns), both)


def beyond_nearest(own: torch.Tensor, nearest: torch.Tensor) -> torch.Tensor:
    """How far `own` lies outside of what runs from zero to a little more than rounding to nearest."""
    furthest = OF_NEAREST * nearest
    return (own - own.clamp(min=furthest.clamp(max=0), max=furthest.clamp(min=0))).abs()


def family(sums: torch.Tensor, *, least: float = FAMILY_LIMIT, alike: float = 1.0) -> Projection | None:
    """The projection of each of many groups [K + 4, ...], the spread moderated towards that of all groups. `alike`:
    how many rows of a group err as one, so that its variance is so many times that of independent rows."""
    sums = sums.reshape(sums.shape[0], -1)
    filled = sums[SQUARE] > 0
    if not bool(filled.any()):
        return None
    safe = torch.where(filled, sums[SQUARE], torch.ones_like(sums[SQUARE]))
    variance, _, freedom = _variance(sums[:, filled])
    spread = torch.ones_like(safe)
    spread[filled] = (alike * variance).sqrt() / safe[filled]
    limit = torch.full_like(spread, ratio_limit(1.0, freedom, least))
    return _projection(sums[OWN], sums[NEAREST], torch.where(filled, safe, torch.inf), spread, limit)


def _projection(
    own: torch.Tensor, nearest: torch.Tensor, square: torch.Tensor, spread: torch.Tensor, limit: torch.Tensor
) -> Projection:
    return Projection(own / square, spread, limit, beyond_nearest(own, nearest) / square / spread)


def over_rows(
    rows: torch.Tensor, group: torch.Tensor, count: int, *, coupled: bool = False, alike: float = 1.0
) -> Projection | None:
    """The projection of `count` groups of (row, head) pairs: rows [K + 4, R, H], group int64 [R, H].

    Errors of different rows, and of different heads, are independent, so the spread of a sum follows from theirs;
    where rows are not (`coupled`), those of a head are summed first. `alike` as in `family`.
    """
    if coupled:
        if not bool((group == group[:1]).all()):
            return None
        rows, group = rows.sum(1, keepdim=True), group[:1]
    units, group = rows.reshape(rows.shape[0], -1), group.reshape(-1)
    filled = units[SQUARE] > 0
    if not bool(filled.any()):
        return None
    units, group = units[:, filled], group[filled]
    variance, freedom, _ = _variance(units)

    def total(values: torch.Tensor) -> torch.Tensor:
        return values.new_zeros(count).index_add_(0, group, values)

    square, all_variance = total(units[SQUARE]), total(variance)
    used = square > 0
    square = torch.where(used, square, torch.ones_like(square))
    effective = all_variance.square() / total(variance.square()).clamp(min=1e-300) * freedom / alike
    limit = torch.full_like(square, WHOLE_LIMIT)
    limit[used] = limit.new_tensor([ratio_limit(1.0, max(f, 0.5), WHOLE_LIMIT) for f in effective[used].tolist()])
    spread = torch.where(used, (alike * all_variance).sqrt() / square, torch.ones_like(square))
    return _projection(total(units[OWN]), total(units[NEAREST]), square, spread, limit)


def _variance(units: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """(variance of lane 0 [G], degrees of freedom of each group's own and of its moderated variance): inner roundings
    as the replicates show, moderated towards the other groups', the output's rounding and float32 sums as known."""
    square, outer = units[SQUARE], units[SQUARE] - units[INNER]
    if units.shape[0] < 6:  # no two replicates: only the output is rounded
        return square, 1e6, 1e6
    spread = group_spread((units[REPLICATES].square() + outer) / square, 1.0)
    return square * spread.moderated, spread.freedom * (units.shape[0] - 4), spread.denominator_freedom
