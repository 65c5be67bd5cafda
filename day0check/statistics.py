"""Ratios of medians with bootstrap intervals, for times. NumPy and SciPy do the work."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST_SAMPLES = 5
SMALLEST_SPREAD = 0.03
FEW_RUNS_SPREAD = 0.04
_RESAMPLES = 2000
_SEED = 20261130


@dataclass(frozen=True)
class Ratio:
    """`value` = median(now) / median(then); [`low`, `high`] its 95 % bootstrap interval; `samples` of `now`."""

    value: float
    low: float
    high: float
    samples: int

    def divided_by(self, factor: float) -> Ratio:
        return Ratio(self.value / factor, self.low / factor, self.high / factor, self.samples)

    def widened(self, spread: float) -> Ratio:
        """The interval with a further factor of e^(±2 `spread`): what runs differ by among themselves."""
        factor = math.exp(2 * spread)
        return Ratio(self.value, self.low / factor, self.high * factor, self.samples)


def ratio_of_medians(now: Sequence[float], then: Sequence[float]) -> Ratio:
    """The ratio with a percentile bootstrap over both sides (Efron 1979), the same for the same numbers.

    Raises ValueError for an empty side or a median of `then` that is not above zero.
    """
    import numpy
    from scipy.stats import bootstrap

    if not len(now) or not len(then) or not numpy.median(then) > 0:
        raise ValueError("both sides need samples, and the earlier median must be above zero")

    def statistic(a, b, axis=-1):  # type: ignore[no-untyped-def]
        return numpy.median(a, axis=axis) / numpy.median(b, axis=axis)

    value = float(statistic(numpy.asarray(now), numpy.asarray(then)))
    if len(now) < 2 and len(then) < 2:
        return Ratio(value, value, value, len(now))
    sides = tuple(numpy.asarray(s if len(s) > 1 else [*s, *s], dtype=float) for s in (now, then))
    interval = bootstrap(
        sides,
        statistic,
        n_resamples=_RESAMPLES,
        vectorized=True,
        method="percentile",
        random_state=numpy.random.default_rng(_SEED),
    ).confidence_interval
    return Ratio(value, float(interval.low), float(interval.high), len(now))


def spread_of_runs(medians: Sequence[float]) -> float:
    """Standard deviation of the logarithms of the runs' medians, at least 0.03; 0.04 is taken where fewer than three
    runs say too little (measured on a 2-core machine: 0.01 when it is quiet, 0.1 under a load of five)."""
    if len(medians) < 3 or min(medians) <= 0:
        return FEW_RUNS_SPREAD
    logs = [math.log(m) for m in medians]
    mean = sum(logs) / len(logs)
    return max(SMALLEST_SPREAD, math.sqrt(sum((x - mean) ** 2 for x in logs) / (len(logs) - 1)))


def median(values: Sequence[float]) -> float:
    """The middle value; the mean of the two middle ones of an even count. Raises ValueError when there is none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("there are no values")
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
