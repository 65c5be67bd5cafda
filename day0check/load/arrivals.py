"""When requests are due in an open loop: seconds from its beginning, known before it starts."""

from __future__ import annotations

import random


def constant(rate_per_s: float, count: int) -> tuple[float, ...]:
    """`count` arrivals at equal distances. Raises ValueError for a rate that is not above zero."""
    _check(rate_per_s)
    return tuple(i / rate_per_s for i in range(count))


def poisson(rate_per_s: float, count: int, *, seed: int) -> tuple[float, ...]:
    """`count` arrivals of a Poisson process, the first at 0; the same for the same seed."""
    _check(rate_per_s)
    draw, due, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(due)
        due += draw.expovariate(rate_per_s)
    return tuple(times)


def _check(rate_per_s: float) -> None:
    if not rate_per_s > 0:
        raise ValueError(f"the rate must be above zero, got {rate_per_s}")
