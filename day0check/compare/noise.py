"""The noise map: the variance that every element of a healthy result may have under the claimed precision.

Legend: R rows, H heads (1 for plain matrices), C channels, K replicates. All variances float64. Source: method notes,
"The statistics of a compute operator", items 1 and 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from day0check.compare.rounding import random_variance, ulp

FIT_ROUNDS = 4  # one pass of row mean times column mean leaves columns off by a factor of two
FEW = 64  # samples below which a column factor is drawn towards the others
PRIOR = 4.0  # how strongly, in samples
TAIL = 1e-12  # 1e-3 false alarms a run of 1e9 groups


@dataclass(frozen=True)
class NoiseMap:
    """`variance` [R, H, C] of a healthy element, `spread` [K, R, H, C]: the replicates' own squared errors over it,
    `inner` [R, H, C] the part of the variance that inner roundings make."""

    variance: torch.Tensor
    spread: torch.Tensor
    quiet: torch.Tensor  # [R, H, C] bool: nothing is rounded there, only float32 sums can differ
    inner: torch.Tensor


def as_matrix(x: torch.Tensor) -> torch.Tensor:
    """[rows, ...] as [R, H, C]: the last axis are channels, what lies between are heads."""
    if x.dim() == 1:
        return x.reshape(-1, 1, 1)
    return x.reshape(x.shape[0], -1, x.shape[-1])


def fit_rows_and_columns(v: torch.Tensor, *, samples: int) -> torch.Tensor:
    """Squares v [R, H, C] smoothed as row factor [R, H] times column factor [H, C] by alternating means.

    `samples`: how many squares stand behind each element of v. Rows and columns of zeros stay zero.
    """
    column = v.mean(0)
    for _ in range(FIT_ROUNDS):
        row = _mean_ratio(v, column.unsqueeze(0), -1)
        column = _mean_ratio(v, row.unsqueeze(-1), 0)
    behind = samples * v.shape[0]
    if behind < FEW:
        column = _drawn_together(column, behind)
    return row.unsqueeze(-1) * column.unsqueeze(0)


def _mean_ratio(v: torch.Tensor, factor: torch.Tensor, axis: int) -> torch.Tensor:
    """Mean over `axis` of v / factor where the factor is positive; v and factor have a size in common on that axis."""
    positive = factor > 0
    counted = positive.sum(axis).clamp_(min=1)
    if bool(positive.all()):
        return (v / factor).sum(axis) / counted
    ratio = v / torch.where(positive, factor, torch.ones_like(factor))
    return torch.where(positive, ratio, torch.zeros_like(ratio)).sum(axis) / counted


def _drawn_together(column: torch.Tensor, behind: int) -> torch.Tensor:
    """Column factors of few samples, moved towards their geometric mean by PRIOR samples."""
    positive = column > 0
    if not bool(positive.any()):
        return column
    logarithm = torch.log(torch.where(positive, column, torch.ones_like(column)))
    centre = logarithm.sum() / positive.sum()
    moved = (behind * logarithm + PRIOR * centre) / (behind + PRIOR)
    return torch.where(positive, moved.exp(), column)


def noise_map(
    oracle: torch.Tensor,
    replicates: list[torch.Tensor],
    *,
    floor: torch.Tensor,
    out_dtype: str | None,
    internal: torch.Tensor | None = None,
    least: torch.Tensor | None = None,
    weights_of: torch.Tensor | None = None,
) -> NoiseMap:
    """The noise map of a result with internal rounding.

    oracle, floor, replicates [R, H, C] float64; replicates are results before the output rounding; `floor` is the
    standard deviation of float32 sums; `out_dtype` None when the result is not rounded; `internal`: the variance of
    the internal roundings where a formula gives it, instead of the fit to the replicates; `least`: that of the last of
    several, below which no fit may fall (all replicates of a row of two keys may round alike). `weights_of` int64 [R]:
    rows of the same number went through the same weights (an expert's), and only those share column factors.
    """
    errors = [(r - oracle).square_() for r in replicates]
    if internal is None:
        squares = torch.stack(errors).mean(0)
        internal = torch.zeros_like(squares)
        for number in (None,) if weights_of is None else weights_of.unique():
            rows = slice(None) if number is None else weights_of == number
            internal[rows] = fit_rows_and_columns(squares[rows], samples=len(errors))
        internal = internal if least is None else torch.maximum(internal, least)
    float32 = floor.square()
    variance = internal + float32
    quiet = internal == 0
    if out_dtype is not None:
        step = ulp(oracle.contiguous(), out_dtype)
        variance = variance + step.square() / 6
        quiet &= random_variance(oracle, out_dtype) == 0
        errors = [e + random_variance(r, out_dtype) for e, r in zip(errors, replicates, strict=True)]
    safe = torch.where(variance > 0, variance, torch.ones_like(variance))
    spread = torch.stack([(e + float32) / safe for e in errors])
    return NoiseMap(variance, spread, quiet, internal)


@dataclass(frozen=True)
class Spread:
    """The replicates' own mean squares of a family of groups: moderated values [G], degrees of freedom of one group."""

    moderated: torch.Tensor
    freedom: float
    denominator_freedom: float


def group_spread(means: torch.Tensor, elements: float) -> Spread:
    """Replicates' group means [K, G], K >= 2, moderated towards their common value.

    The degrees of freedom of a group come from how much the replicates differ among themselves, pooled over the
    groups, at most the group's elements: Var = 2 v^2 / freedom. The prior's weight d0 follows from the variance of
    the groups that this does not explain.
    """
    count, groups = means.shape
    value = means.mean(0)
    common = float(value.mean())
    if common <= 0:
        return Spread(value, float(elements), float(count * elements))
    between = float(means.var(0).mean())
    freedom = elements if between <= 0 else min(elements, 2 * float(value.square().mean()) / between)
    freedom /= 1 + 2 / (groups * (count - 1)) ** 0.5  # a variance of few samples may be far too small
    own = count * freedom
    prior = 0.0
    if groups >= 8:
        unexplained = float(value.var()) / common**2 - 2 / own
        prior = 1e4 if unexplained <= 2e-4 else 2 / unexplained
    return Spread((own * value + prior * common) / (own + prior), freedom, own + prior)


def ratio_limit(freedom: float, denominator_freedom: float, least: float) -> float:
    """Largest ratio of root mean squares that noise alone explains, never below `least`."""
    return max(least, _f_quantile(_rounded(freedom), _rounded(denominator_freedom)) ** 0.5)


def _rounded(freedom: float) -> float:
    """Two significant digits, downwards: few different quantiles, each on the careful side."""
    if freedom < 10:
        return max(0.5, int(freedom * 10) / 10)
    digits = 10 ** (len(str(int(freedom))) - 2)
    return float(int(freedom) // digits * digits)


@lru_cache(maxsize=4096)
def _f_quantile(numerator: float, denominator: float) -> float:
    from scipy.special import betaincinv  # late, and not scipy.stats, which takes a second to import

    share = float(betaincinv(denominator / 2, numerator / 2, TAIL))
    return denominator * (1 - share) / (numerator * share)
