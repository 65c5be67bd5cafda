"""The noise of a travelling tensor, from replicates that were carried along, and a candidate's error in its units.

n rows, d columns, R replicates. Errors of the net are heavy-tailed over rows (a sharp softmax or a state can multiply
one rounding), so the map is row factor times column factor, rows moderated towards each other (method.md, 1 and 5).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.special import polygamma

COLUMN_PRIOR = 32.0  # squares with which a column is drawn towards the others: of few rows none is known
ROUNDS = 4  # of alternating means; one is not enough on outlier channels
FLOOR = 4 * 2.0**-24  # of a row's root mean square: float32 arithmetic that no rounding point names
ORDERS = 4.0  # an operator sums several times, and legal orders differ by more than one rounding (method.md, 1)
_MOST_DEGREES = 1e4
_TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True)
class RowErrors:
    """One row a line, all float64 [n] but `replicate_z` [R, n].

    `z`: mean square over columns of the candidate's error in units of the noise map; `replicate_z` the same of each
    replicate. `error`, `noise`, `signal`: sums of squares over columns. `finite`: False where the candidate has NaN or
    infinity and the oracle has not.
    """

    z: torch.Tensor
    replicate_z: torch.Tensor
    error: torch.Tensor
    noise: torch.Tensor
    signal: torch.Tensor
    finite: torch.Tensor


def row_errors(oracle: torch.Tensor, candidate: torch.Tensor, replicates: torch.Tensor) -> RowErrors:
    """Errors of `candidate` [n, d] and of `replicates` [R, n, d] against `oracle` [n, d] in units of the noise map."""
    oracle = oracle.double()
    wide = candidate.double()
    finite = (torch.isfinite(wide) | ~torch.isfinite(oracle)).all(-1)
    error = torch.where(torch.isfinite(wide) & torch.isfinite(oracle), wide - oracle, 0.0).square()
    noise = (replicates.double() - oracle).nan_to_num().square()
    variance = noise_map(noise, oracle)
    return RowErrors(
        z=(error / variance).mean(-1),
        replicate_z=(noise / variance).mean(-1),
        error=error.sum(-1),
        noise=noise.mean(0).sum(-1),
        signal=oracle.nan_to_num().square().sum(-1),
        finite=finite,
    )


@dataclass(frozen=True)
class NoiseFactors:
    """A noise map in small: variance [n, d] = rows [n] x columns [d] + floor [n], float64."""

    rows: torch.Tensor
    columns: torch.Tensor
    floor: torch.Tensor

    def variance(self) -> torch.Tensor:
        return self.rows.unsqueeze(-1) * self.columns + self.floor.unsqueeze(-1)


def noise_map(squares: torch.Tensor, oracle: torch.Tensor) -> torch.Tensor:
    """Variance of each element [n, d]: row factor times column factor of `squares` [R, n, d], plus float32's floor."""
    return noise_factors(squares, oracle).variance()


def noise_factors(squares: torch.Tensor, oracle: torch.Tensor) -> NoiseFactors:
    """The factors of `noise_map`, from `squares` [R, n, d] of the replicates' errors against `oracle` [n, d]."""
    mean_square = squares.mean(0)
    floor = (FLOOR * oracle.nan_to_num().square().mean(-1, keepdim=True).sqrt()).square()
    floor = floor.clamp(min=_TINY)
    columns = torch.ones_like(mean_square[:1])
    for _ in range(ROUNDS):
        rows = (mean_square / columns).mean(-1, keepdim=True)
        columns = (mean_square / rows.clamp(min=_TINY)).mean(0, keepdim=True)
        columns = (columns / columns.mean().clamp(min=_TINY)).clamp(min=1e-12)
    columns = _drawn_together(columns, squares.shape[0] * squares.shape[1])
    each = (squares / columns).mean(-1)
    return NoiseFactors(moderate(each), columns.squeeze(0), floor.squeeze(-1))


def _drawn_together(columns: torch.Tensor, behind: int) -> torch.Tensor:
    """Column factors, of `behind` squares each, moved towards their geometric mean by COLUMN_PRIOR squares."""
    loud = columns > 1e-12
    if not bool(loud.any()):
        return columns
    logs = columns.log()
    moved = (behind * logs + COLUMN_PRIOR * logs[loud].mean()) / (behind + COLUMN_PRIOR)
    return torch.where(loud, moved.exp(), columns)


def moderate(each: torch.Tensor) -> torch.Tensor:
    """Row variances [n] from those of each replicate [R, n], drawn towards their common value by as much as the spread
    over rows and replicates allows (Smyth 2004, limma). Rows without noise are left alone: nothing was rounded there.
    """
    rows = each.mean(0)
    noisy = rows > 0
    if int(noisy.sum()) < 3:
        return rows
    degrees = len(each) * effective_degrees(each)
    spread = float(rows[noisy].log().var()) - float(polygamma(1, degrees / 2))
    prior = 2 * _inverse_trigamma(spread) if spread > 0 else _MOST_DEGREES
    drawn = (prior * rows[noisy].mean() + degrees * rows) / (prior + degrees)
    return torch.where(noisy, drawn, rows)


def effective_degrees(each: torch.Tensor) -> float:
    """Degrees of freedom of one row's mean square, from how far the replicates [R, n] disagree about it.

    log of a mean square of nu degrees varies by trigamma(nu / 2). Between 1 and 10,000.
    """
    each = each[:, (each > 0).all(0)]
    if len(each) < 2 or each.shape[1] == 0:
        return 1.0
    spread = float(each.log().var(0).mean())
    return min(max(2 * _inverse_trigamma(spread), 1.0), _MOST_DEGREES) if spread > 0 else _MOST_DEGREES


def _inverse_trigamma(value: float) -> float:
    """x with trigamma(x) = value, by Newton steps on 1/trigamma (Smyth 2004, appendix)."""
    if value < 1e-6:
        return 1 / value
    x = 0.5 + 1 / value
    for _ in range(20):
        step = float(polygamma(1, x)) * (1 - float(polygamma(1, x)) / value) / float(polygamma(2, x))
        x += step
        if abs(step) < 1e-8 * x:
            break
    return x


def add_float32_noise(value: torch.Tensor, terms: int, generator: torch.Generator) -> torch.Tensor:
    """`value` with a random error as float32 sums over `terms` products make it: `ORDERS` sqrt(terms)/8 2^-24 of
    the row's root mean square. Used where float32 is the claimed precision, so that its sums are the noise.
    """
    if not value.is_floating_point() or value.dim() == 0:
        return value
    size = ORDERS * max(1.0, terms**0.5 / 8) * 2.0**-24
    scale = value.square().mean(-1, keepdim=True).sqrt() * size
    return value + scale * torch.randn(value.shape, generator=generator, dtype=value.dtype, device=value.device)
