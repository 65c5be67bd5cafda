"""Is a run slower than its baseline? Step by step against the same step, as a ratio of medians with an interval.

Each sample is divided by the baseline's median of the same step, so that steps of different size pool. Three ratios
(`probe/timing.py` says where the figures come from):
- `wall`: of the clock on the wall, for people;
- `fair`: without the time in which the processor was given to others;
- `own`: that, in units of the machine's own speed during the run.
A slowdown fails when the whole interval of `own` is past the limit, its effect exceeds the floor, and `fair` says the
same at least in part. So neither a busy nor a slower machine is taken for a slow candidate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from day0check.baseline import Entry, Times, machine_median
from day0check.statistics import FEWEST_SAMPLES, Ratio, median, ratio_of_medians, spread_of_runs

LIMIT = 1.10  # the whole interval must be past it
FLOOR = 0.15  # and the ratio this far above 1
FAIR_FLOOR = 0.05  # and the ratio before the machine's speed is taken out at least this far
OWN_SAMPLES = 16  # a case with so many steps of a phase is judged by itself, too
ALL = "all cases"


@dataclass(frozen=True)
class SpeedRow:
    """One judgement. `what`: a case, or all cases.

    `verdict`: "passed", "failed", "straddles" (past the limit in part, or by other clocks only), "too few".
    """

    what: str
    phase: str
    verdict: str
    wall: Ratio | None = None
    fair: Ratio | None = None
    own: Ratio | None = None

    def record(self) -> dict[str, Any]:
        row: dict[str, Any] = {"what": f"{self.phase} of {self.what}", "verdict": self.verdict, "limit": LIMIT}
        row["floor"] = FLOOR
        if self.wall is not None and self.fair is not None and self.own is not None:
            row |= {"wall_ratio": self.wall.value, "fair_ratio": self.fair.value, "samples": self.own.samples}
            row |= {"ratio": self.own.value, "low": self.own.low, "high": self.own.high}
        return row


@dataclass(frozen=True)
class _Shares:
    """Samples of one clock as shares of the baseline's median of their step; `then` by run of the baseline."""

    now: tuple[float, ...] = ()
    then: tuple[tuple[float, ...], ...] = ()

    def __add__(self, other: _Shares) -> _Shares:
        runs = zip_longest(self.then, other.then, fillvalue=())
        return _Shares(self.now + other.now, tuple(a + b for a, b in runs))

    def ratio(self) -> Ratio:
        """With the interval widened by what runs of the same thing differ by."""
        runs = [run for run in self.then if run]
        every = [share for run in runs for share in run]
        return ratio_of_medians(self.now, every).widened(spread_of_runs([median(run) for run in runs]))


CLOCKS = ("wall", "fair", "own")
_NONE = (_Shares(), _Shares(), _Shares())


def speed_rows(pairs: Iterable[tuple[Entry, Entry]]) -> list[SpeedRow]:
    """A row per phase over all cases, and one per case with many steps of a phase. `pairs`: (baseline, run)."""
    pooled: dict[str, tuple[_Shares, ...]] = {}
    rows = []
    for then, now in pairs:
        for phase in sorted({s.phase for t in then.runs for s in t.steps}):
            shares = tuple(_shares(then, now, phase, clock) for clock in CLOCKS)
            pooled[phase] = tuple(a + b for a, b in zip(pooled.get(phase, _NONE), shares, strict=True))
            if len(shares[0].now) >= OWN_SAMPLES:
                rows.append(judged(now.case, phase, shares))
    return [*(judged(ALL, phase, shares) for phase, shares in sorted(pooled.items())), *rows]


def judged(what: str, phase: str, shares: tuple[_Shares, ...]) -> SpeedRow:
    if len(shares[0].now) < FEWEST_SAMPLES:
        return SpeedRow(what, phase, "too few")
    wall, fair, own = (s.ratio() for s in shares)
    return SpeedRow(what, phase, verdict_of(wall, fair, own), wall, fair, own)


def verdict_of(wall: Ratio, fair: Ratio, own: Ratio) -> str:
    """ "failed", "straddles" or "passed": see the top of this file."""
    slower = own.low > LIMIT and own.value - 1 > FLOOR
    if slower and fair.value - 1 > FAIR_FLOOR:
        return "failed"
    in_part = own.high > LIMIT and own.value - 1 > FAIR_FLOOR
    return "straddles" if slower or in_part or fair.low > LIMIT or wall.low > LIMIT else "passed"


def _shares(then: Entry, now: Entry, phase: str, clock: str) -> _Shares:
    """Steps that both have, with the same rows; what only one has cannot be compared."""
    base: dict[tuple[int, int], list[float]] = {}
    for run in then.runs:
        for key, seconds in _steps(run, phase, clock).items():
            base.setdefault(key, []).append(seconds)
    middle = {key: median(values) for key, values in base.items()}
    fresh = [_steps(run, phase, clock) for run in now.runs]
    return _Shares(
        now=tuple(s / middle[k] for steps in fresh for k, s in steps.items() if k in middle),
        then=tuple(tuple(s / middle[k] for k, s in _steps(run, phase, clock).items()) for run in then.runs),
    )


def _steps(run: Times, phase: str, clock: str) -> dict[tuple[int, int], float]:
    """Figures of one clock by (index of the step within the phase, rows)."""
    unit = machine_median(run) if clock == "own" else 1.0
    steps = [s for s in run.steps if s.phase == phase]
    return {(i, s.rows): (s.seconds if clock == "wall" else s.own_seconds) / unit for i, s in enumerate(steps)}
