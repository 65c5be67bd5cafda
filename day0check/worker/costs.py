"""The sweep of the cost check in the process that has the model loaded: unobserved but for counters and a clock.

Requests are those of the case: the first prompt's tokens, repeated to every length. Each point runs once under
counters (memory, bytes moved, products) and `REPEATS` times under a clock alone; what the processor gave to others is
in no time. Where work steps up, the sweep is narrowed to sizes beside each other, under counters alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from day0check.compare.cost import CostLine, Costs, write_costs
from day0check.compare.cost_step import MOST_SIZES, NEAR, Steps
from day0check.contracts.costs import cost_of
from day0check.probe.memory import Allocations
from day0check.probe.recorder import Call, Observer, Recorder
from day0check.probe.timing import compiled_graphs, wait_for, waited
from day0check.types import Outputs, Request, RunCase, Schedule, Turn

CHECK = "cost"
LONGEST, SHORTEST, RATIO = 2048, 32, 2**0.5
BATCHES, BATCH_LENGTH = (1, 2, 4, 8), 128
STEPS = 3  # decode steps of a point, of which the last is kept
REPEATS = 2
UNCOUNTED = (
    "memory and work of graphs that torch.compile made cannot be counted, only that none is made after warm-up was "
    "seen; for the rest run the case without --compile"
)

Run = Callable[[tuple[Request, ...], Schedule, Recorder], Outputs]


Moment = tuple[float, float, float]


def moment() -> Moment:
    return time.perf_counter(), waited(), time.thread_time()


def own_seconds(begin: Moment) -> float:
    """Seconds since `begin` that this thread worked, slept or waited for a device, and not those in which others had
    the processor. The system counts the latter in coarse ticks: what this thread computed is never less than its time
    on the processor."""
    wall, lost, busy = (now - then for now, then in zip(moment(), begin, strict=True))
    return max(wall - lost, busy, 1e-9)


@dataclass(frozen=True)
class Point:
    sweep: str
    size: int
    requests: tuple[Request, ...]
    schedule: Schedule


def points_of(case: RunCase, *, positions: int) -> tuple[Point, ...]:
    """Single requests whose lengths grow by the square root of two up to LONGEST or what `positions` allow, then
    batches of equal requests. Prompts are computed in one piece."""
    longest = _longest(positions)
    lengths, length = [], float(SHORTEST)
    while round(length) <= longest:
        lengths.append(round(length))
        length *= RATIO
    sizes = [*(("length", n) for n in lengths), *(("batch", n) for n in BATCHES)]
    return tuple(point_of(case, sweep, size, positions=positions) for sweep, size in sizes)


def point_of(case: RunCase, sweep: str, size: int, *, positions: int) -> Point:
    """One point: a request of `size` tokens for sweep "length", `size` equal requests for "batch"."""
    tokens = case.requests[0].turns[0].tokens
    single = sweep == "length"
    length = size if single else min(BATCH_LENGTH, _longest(positions))
    repeated = (tokens * (length // len(tokens) + 1))[:length]
    names = ["cost"] if single else [f"cost{i}" for i in range(size)]
    requests = tuple(Request(f"{case.id}/{n}#0", (Turn(repeated),), max_new_tokens=STEPS + 1) for n in names)
    return Point(sweep, size, requests, replace(case.schedule, chunk=None, events=(), max_batch=max(BATCHES)))


def _longest(positions: int) -> int:
    return min(LONGEST, positions - STEPS - 1)


@dataclass
class _Sum:
    """What a tap took in one step."""

    call: Call
    order: int
    calls: int = 0
    operations: float = 0.0
    bytes: float = 0.0
    done: float = 0.0
    moved: float = 0.0
    scratch: float = 0.0
    kept: float = 0.0
    seconds: float = 0.0
    modelled: bool = True


@dataclass
class _Sums:
    """By (tap, phase), those of the last step of the phase."""

    step: dict[tuple[str, str], int] = field(default_factory=dict)
    found: dict[tuple[str, str], _Sum] = field(default_factory=dict)

    def of(self, call: Call) -> _Sum:
        key = (call.tap, call.phase)
        if self.step.get(key) != call.step:
            self.step[key] = call.step
            light = Call(call.place, call.operator, call.site, call.phase, call.step, call.order, call.rows, (), {})
            self.found[key] = _Sum(light, call.order)
        return self.found[key]


class Counters(Observer):
    """Counts memory and work of every call; `taken` must be entered around the run."""

    def __init__(self, taken: Allocations) -> None:
        self.taken, self.sums = taken, _Sums()

    def before(self, call: Call) -> tuple[int, int, int]:
        self.taken.restart_peak()
        return self.taken.live_bytes, self.taken.moved_bytes, self.taken.operations

    def after(self, call: Call, token: tuple[int, int, int], results: tuple[Any, ...]) -> None:
        live, moved, operations = token
        taken, sums = self.taken, self.sums.of(call)
        given = {t.untyped_storage()._cdata for t in (*call.args, *call.kwargs.values()) if isinstance(t, torch.Tensor)}
        own: dict[int, int] = {}
        for result in results:
            if isinstance(result, torch.Tensor) and (storage := result.untyped_storage())._cdata not in given:
                own[storage._cdata] = storage.nbytes()
        cost = cost_of(call.operator, *call.args, **call.kwargs)
        sums.calls += 1
        sums.done += taken.operations - operations
        sums.moved += taken.moved_bytes - moved
        sums.scratch = max(sums.scratch, taken.peak_bytes - live - sum(own.values()))
        sums.kept += max(0, taken.live_bytes - live - sum(own.values()))
        if cost is None:
            sums.modelled = False
        else:
            sums.operations += cost.operations
            sums.bytes += cost.bytes


class Clock(Observer):
    """Seconds of every call, without those in which the processor was given to others."""

    def __init__(self, device: str) -> None:
        self.sums, self._wait = _Sums(), wait_for(device)

    def before(self, call: Call) -> Moment:
        self._wait()
        return moment()

    def after(self, call: Call, token: Moment, results: tuple[Any, ...]) -> None:
        self._wait()
        self.sums.of(call).seconds += own_seconds(token)


def measure_costs(run: Run, case: RunCase, directory: Path, *, positions: int, device: str) -> None:
    """Makes the sweep and writes costs.jsonl into `directory`. What the candidate raises passes through.

    Graphs of torch.compile do not run under counters, nor do counters see what they allocate: of a candidate that has
    any, the sweep shows at which points it makes more of them.
    """
    points = points_of(case, positions=positions)
    _warm_up(points, run)
    if compiled_graphs():
        write_costs(directory, Costs(missing=UNCOUNTED, recompiled=_compiled_anew(points, run)))
        return
    lines = [line for point in points for line in _lines_of(point, run, device, repeats=REPEATS)]
    asked: list[tuple[str, int]] = []
    while len(asked) < MOST_SIZES and (place := Steps(lines).next_size(asked)) is not None:
        asked.append(place)
        near = _lines_of(point_of(case, *place, positions=positions), run, device, repeats=0)
        lines.extend(replace(line, sweep=NEAR + line.sweep) for line in near)
    write_costs(directory, Costs(tuple(lines), copy_roof(device)))


def _compiled_anew(points: Sequence[Point], run: Run) -> tuple[tuple[str, int, int], ...]:
    """(sweep, size, graphs) of the points at which graphs are compiled that warm-up has not made."""
    found = []
    for point in points:
        before = compiled_graphs()
        run(point.requests, point.schedule, Recorder([Observer()]))  # observed: each operator is a call
        if compiled_graphs() > before:
            found.append((point.sweep, point.size, compiled_graphs() - before))
    return tuple(found)


def _warm_up(points: Sequence[Point], run: Run) -> None:
    """Two lengths and two batches: what is compiled for shapes that may change has seen all that it needs."""
    for sweep in ("length", "batch"):
        for point in [p for p in points if p.sweep == sweep][1:3]:
            run(point.requests, point.schedule, Recorder([Observer()]))


def _lines_of(point: Point, run: Run, device: str, *, repeats: int) -> Iterator[CostLine]:
    clocks = []
    for _ in range(repeats):
        clock = Clock(device)
        run(point.requests, point.schedule, Recorder([clock]))
        clocks.append(clock.sums.found)
    taken = Allocations()
    counters = Counters(taken)
    with taken:
        run(point.requests, point.schedule, Recorder([counters]))
    for (tap, phase), found in counters.sums.found.items():
        if not found.modelled:
            continue
        yield CostLine(
            tap=tap,
            operator=found.call.operator,
            layer=found.call.layer,
            phase=phase,
            sweep=point.sweep,
            size=point.size,
            order=found.order,
            calls=found.calls,
            operations=found.operations,
            bytes=found.bytes,
            done=found.done,
            moved=found.moved,
            scratch=max(0.0, found.scratch),
            kept=found.kept,
            seconds=min((c[tap, phase].seconds for c in clocks if (tap, phase) in c), default=None),
        )


def copy_roof(device: str) -> float:
    """Bytes a second that this process reads at now: the best of a few sums of 64 MiB."""
    x, wait = torch.ones(1 << 24, device=device), wait_for(device)
    best = float("inf")
    for _ in range(5):
        wait()
        begin = moment()
        x.sum()
        wait()
        best = min(best, own_seconds(begin))
    return x.numel() * x.element_size() / best
