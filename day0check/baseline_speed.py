"""Is a run slower than its baseline? Step by step against the same step, as a ratio of medians with an interval.

Each sample is divided by the baseline's median of the same step, so that steps of different size pool. Beside the
plain ratio stands one with the machine taken out (`machine_seconds` of `probe/timing.py`), so that a busy machine is
not taken for a slow candidate. A slowdown fails when, with the machine taken out, the whole interval is past the limit
and the effect exceeds the floor, and the clock on the wall does not say the opposite.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from day0check.baseline import Entry, Times, machine_median
from day0check.statistics import FEWEST_SAMPLES, Ratio, median, ratio_of_medians, spread_of_runs

LIMIT = 1.10  # the whole interval must be past it
FLOOR = 0.15  # and the ratio this far above 1
WALL_FLOOR = 0.05  # and the plain ratio at least this far
OWN_SAMPLES = 16  # a case with so many steps of a phase is judged by itself, too
ALL = "all cases"


@dataclass(frozen=True)
class SpeedRow:
    """One judgement. `what`: a case, or all cases; `own`: the ratio with the machine taken out.

    `verdict`: "passed", "failed", "straddles" (past the limit in part, or only on the wall), "too few".
    """

    what: str
    phase: str
    verdict: str
    plain: Ratio | None = None
    own: Ratio | None = None

    def record(self) -> dict[str, Any]:
        row: dict[str, Any] = {"what": f"{self.phase} of {self.what}", "verdict": self.verdict, "limit": LIMIT}
        row |= {"floor": FLOOR}
        if self.plain is not None and self.own is not None:
            row |= {"ratio": self.plain.value, "low": self.plain.low, "high": self.plain.high}
            row |= {"own_ratio": self.own.value, "own_low": self.own.low, "own_high": self.own.high}
            row |= {"samples": self.plain.samples}
        return row


@dataclass(frozen=True)
class _Shares:
    """Samples as shares of the baseline's median of their step; `runs`: the median of each baseline run."""

    now: tuple[float, ...] = ()
    then: tuple[float, ...] = ()
    now_own: tuple[float, ...] = ()
    then_own: tuple[float, ...] = ()
    runs: tuple[float, ...] = ()

    def __add__(self, other: _Shares) -> _Shares:
        names = ("now", "then", "now_own", "then_own", "runs")
        return _Shares(*(getattr(self, n) + getattr(other, n) for n in names))


def speed_rows(pairs: Iterable[tuple[Entry, Entry]]) -> list[SpeedRow]:
    """A row per phase over all cases, and one per case with many steps of a phase. `pairs`: (baseline, run)."""
    pooled: dict[str, _Shares] = {}
    rows = []
    for then, now in pairs:
        for phase in sorted({s.phase for t in then.runs for s in t.steps}):
            shares = _shares(then, now, phase)
            pooled[phase] = pooled.get(phase, _Shares()) + shares
            if len(shares.now) >= OWN_SAMPLES:
                rows.append(judged(now.case, phase, shares))
    return [*(judged(ALL, phase, shares) for phase, shares in sorted(pooled.items())), *rows]


def judged(what: str, phase: str, shares: _Shares) -> SpeedRow:
    if len(shares.now) < FEWEST_SAMPLES:
        return SpeedRow(what, phase, "too few")
    spread = spread_of_runs(shares.runs) if what != ALL else 0.0
    plain = ratio_of_medians(shares.now, shares.then).widened(spread)
    own = ratio_of_medians(shares.now_own, shares.then_own).widened(spread)
    return SpeedRow(what, phase, verdict_of(plain, own), plain, own)


def verdict_of(plain: Ratio, own: Ratio) -> str:
    """ "failed", "straddles" or "passed": see the top of this file."""
    slower = own.low > LIMIT and own.value - 1 > FLOOR
    if slower and plain.value - 1 > WALL_FLOOR:
        return "failed"
    if slower or (own.high > LIMIT and own.value - 1 > WALL_FLOOR) or plain.low > LIMIT:
        return "straddles"
    return "passed"


def _shares(then: Entry, now: Entry, phase: str) -> _Shares:
    """Steps that both have, with the same rows; what only one has cannot be compared."""
    machines = [machine_median(run) for run in then.runs]
    base: dict[tuple[int, int], list[float]] = {}
    base_own: dict[tuple[int, int], list[float]] = {}
    for run, machine in zip(then.runs, machines, strict=True):
        for key, seconds in _steps(run, phase).items():
            base.setdefault(key, []).append(seconds)
            base_own.setdefault(key, []).append(seconds / (machine or 1.0))
    middle = {k: median(v) for k, v in base.items()}
    middle_own = {k: median(v) for k, v in base_own.items()}
    fresh: dict[str, list[float]] = {"plain": [], "own": []}
    for run in now.runs:
        machine = machine_median(run) or 1.0
        for key, seconds in _steps(run, phase).items():
            if middle.get(key):
                fresh["plain"].append(seconds / middle[key])
                fresh["own"].append(seconds / machine / middle_own[key])
    runs = [[s / middle[k] for k, s in _steps(run, phase).items() if middle.get(k)] for run in then.runs]
    return _Shares(
        now=tuple(fresh["plain"]),
        then=tuple(v / middle[k] for k, values in base.items() if middle[k] for v in values),
        now_own=tuple(fresh["own"]),
        then_own=tuple(v / middle_own[k] for k, values in base_own.items() if middle_own[k] for v in values),
        runs=tuple(median(values) for values in runs if values),
    )


def _steps(run: Times, phase: str) -> dict[tuple[int, int], float]:
    """Seconds by (index of the step within the phase, rows)."""
    steps = [s for s in run.steps if s.phase == phase]
    return {(i, s.rows): s.seconds for i, s in enumerate(steps)}
