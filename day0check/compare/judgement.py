"""What one judgement of one call says, and how several become one. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

COUNTS = frozenset({"mismatched_bytes", "inexact", "illegal", "skipped", "ties", "non_finite", "wrong_weights"})


MOST_BAD = 4096


@dataclass(frozen=True)
class Judgement:
    """One replayed call. `statistics` and `limits` share keys; a statistic without a limit is information.

    `row` is the row of the result that gives the address, `axis` what such a row is (as in `contract.Result.rows`).
    `bad`: the first `MOST_BAD` of the rows beyond their limit, `sizes`: how far each is, where that is known.
    """

    rows: int
    elements: int
    statistics: dict[str, float] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    failing: str = ""
    row: int | None = None
    axis: str = "rows"
    pattern: str = ""
    message: str = ""
    power: float | None = None
    not_judged: str = ""
    bad: tuple[int, ...] = ()
    sizes: tuple[float, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failing and not self.not_judged


def excess(statistic: float, limit: float) -> float:
    """How far a statistic is beyond its limit, 1 at the limit; a limit of 0 allows nothing."""
    if statistic != statistic:
        return float("inf")
    if limit > 0:
        return statistic / limit
    return 0.0 if statistic <= limit else float("inf")


def beyond(statistics: dict[str, float], limits: dict[str, float]) -> str:
    """The limited statistic furthest beyond its limit, "" when all are within; the first in order wins a tie."""
    worst, name = 1.0, ""
    for key, limit in limits.items():
        if key in statistics and excess(statistics[key], limit) > worst:
            worst, name = excess(statistics[key], limit), key
    return name


def merge(first: Judgement, second: Judgement) -> Judgement:
    """Both as one: counts add up, of any other statistic the pair (value, limit) nearest to failure stays.

    The address and the words are those of the first that failed. Power: the smallest error that either could see.
    """
    statistics, limits = dict(first.statistics), dict(first.limits)
    for key, value in second.statistics.items():
        if key in COUNTS:
            statistics[key] = statistics.get(key, 0.0) + value
            if key in second.limits:
                limits[key] = second.limits[key]
        elif key not in statistics or _nearer(second, first, key):
            statistics[key] = value
            limits.pop(key, None)
            if key in second.limits:
                limits[key] = second.limits[key]
    told = first if not first.passed or second.passed else second
    powers = [p for p in (first.power, second.power) if p is not None]
    return replace(
        told,
        rows=first.rows + second.rows,
        elements=first.elements + second.elements,
        statistics=statistics,
        limits=limits,
        power=min(powers) if powers else None,
        bad=(first.bad + second.bad)[:MOST_BAD],
        sizes=(first.sizes + second.sizes)[:MOST_BAD],
        not_judged=first.not_judged or second.not_judged,
    )


def _nearer(second: Judgement, first: Judgement, key: str) -> bool:
    """Whether the second's value of `key` replaces the first's: limited before unlimited, then the larger excess."""
    if (key in second.limits) != (key in first.limits):
        return key in second.limits
    if key in second.limits:
        return excess(second.statistics[key], second.limits[key]) > excess(first.statistics[key], first.limits[key])
    return second.statistics[key] > first.statistics[key]
