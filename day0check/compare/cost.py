"""What operators cost as lengths, batches and layers grow, beside the cost models of their contracts. No torch.

A sweep runs single requests of growing length, then growing batches of one length, and adds up for each tap and phase
what one step took. Four laws, whose limits leave room for any implementation of the same order:
- kept: an operator keeps no memory but its results. What grows with every call is a leak or a hidden cache.
- scratch: between the two largest sizes, memory that lives inside a call grows by at most `SCRATCH` times what the
  model says is read and written. Blocks of fixed size cost nothing here, an intermediate per head or pair does.
- work: bytes moved and products computed, counted and not timed, follow the model: no step at some size (the law is
  in `compare/cost_step.py`), no growth of a higher order than the model's.
- time: between the smallest and the largest size, time grows at least as fast as a roof measured in the same process
  would allow, over `SLOWEST`. Only what is far beyond any implementation fails: time is noisy where work is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from day0check.compare.cost_step import NEAR, Law, Steps
from day0check.contracts import CONTRACTS
from day0check.errors import InputError
from day0check.types import Measure, from_json, to_json

FILE = "costs.jsonl"
SCRATCH, SCRATCH_FLOOR_BYTES = 6.0, 32 << 20
KEPT_FLOOR_BYTES = 1 << 16
ORDER = 0.5
FLAT, GROWS = 0.05, 0.5  # logarithms of how much a model grows over the upper half of a sweep
LAYERS = 1.6
SLOWEST, TIME_FLOOR_SECONDS = 256.0, 2e-3
BALANCE = 5.0  # operations that weigh as much as one byte


@dataclass(frozen=True)
class CostLine:
    """What a tap took in one step of one point of a sweep. `size`: positions of the request, or requests of the batch.

    `operations` and `bytes` are the contract's model, `done` and `moved` what was counted, `scratch` and `kept` bytes
    that lived inside and after the calls beside their results, `seconds` the least of several runs.
    """

    tap: str
    operator: str
    layer: int | None
    phase: str
    sweep: str  # "length" | "batch"; "near length", "near batch" at sizes at which a step was looked for
    size: int
    order: int
    calls: int
    operations: float
    bytes: float
    done: float
    moved: float
    scratch: float
    kept: float
    seconds: float | None = None

    @property
    def model(self) -> float:
        return self.bytes + self.operations / BALANCE

    @property
    def work(self) -> float:
        return self.moved + self.done / BALANCE


@dataclass(frozen=True)
class Costs:
    """The content of costs.jsonl: a head with the roof of the process, then lines. `missing`: why there is none.

    `recompiled`: (sweep, size, graphs) of the points at which torch.compile made graphs after it was warm.
    """

    lines: tuple[CostLine, ...] = ()
    roof_bytes_per_second: float = 0.0
    missing: str = ""
    recompiled: tuple[tuple[str, int, int], ...] = ()


def write_costs(directory: Path, costs: Costs) -> None:
    head = {"roof_bytes_per_second": costs.roof_bytes_per_second, "missing": costs.missing}
    head["recompiled"] = [list(point) for point in costs.recompiled]
    text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in (head, *map(to_json, costs.lines)))
    partial = directory / (FILE + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(directory / FILE)


def read_costs(directory: Path) -> Costs | None:
    """None when the sweep was not made. Raises InputError for a file that is none of ours."""
    path = directory / FILE
    if not path.is_file():
        return None
    try:
        head, *rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        lines = tuple(from_json(CostLine, row) for row in rows)
        recompiled = tuple((str(s), int(n), int(graphs)) for s, n, graphs in head["recompiled"])
        return Costs(lines, float(head["roof_bytes_per_second"]), str(head["missing"]), recompiled)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"no record of costs: {error}", where=str(path), todo="run the case again") from error


def judge_costs(costs: Costs) -> tuple[Measure, ...]:
    """A measure for each (tap, phase) with a model, over all laws and sweeps. One whose steps were not looked for at
    sizes that lie beside each other is not judged."""
    series: dict[tuple[str, str], dict[str, list[CostLine]]] = {}
    for line in costs.lines:
        series.setdefault((line.tap, line.phase), {}).setdefault(line.sweep, []).append(line)
    alike = _medians(line for line in costs.lines if not line.sweep.startswith(NEAR))
    steps = Steps(costs.lines)
    return tuple(_judged(sweeps, alike, costs.roof_bytes_per_second, steps) for sweeps in series.values())


def _judged(sweeps: dict[str, list[CostLine]], alike: dict[Any, float], roof: float, steps: Steps) -> Measure:
    first = next(iter(sweeps.values()))[0]
    statistics: dict[str, float] = {}
    limits: dict[str, float] = {}
    notes: dict[str, str] = {}
    unresolved = ""
    for sweep, lines in sweeps.items():
        if sweep.startswith(NEAR):
            continue
        points = sorted((line for line in lines if line.model > 0), key=lambda line: (line.model, line.size))
        places, open_at = steps.laws(first.tap, first.phase, sweep)
        unresolved = unresolved or open_at
        for name, value, limit, words in (*_laws(points, alike, roof), *places):
            key = f"{name}_{sweep}"
            if value > statistics.get(key, -math.inf):
                statistics[key], limits[key], notes[key] = value, limit, words
    failing = [key for key in statistics if statistics[key] > limits[key]]
    worst = max(failing, key=lambda key: statistics[key] / limits[key], default="")
    total = [line for lines in sweeps.values() for line in lines]
    return Measure(
        tap=first.tap,
        operator=first.operator,
        kind=CONTRACTS[first.operator].kind if first.operator in CONTRACTS else "compute",
        phase=first.phase,
        layer=first.layer,
        order=min(line.order for line in total),
        rows=sum(line.calls for line in total),
        elements=len(total),
        passed=not failing and not unresolved,
        statistics=statistics,
        limits=limits,
        failing=worst,
        pattern=_PATTERNS[worst.partition("_")[0]] if worst else "",
        message=notes[worst] if worst else "",
        not_judged="" if worst else unresolved,
    )


_PATTERNS = {
    "kept": "memory that grows with every call",
    "scratch": "memory beyond its cost model",
    "step": "a step in the work",
    "order": "work of a higher order than its cost model",
    "layers": "one layer does more than the others",
    "time": "time beyond its cost model",
}


def _laws(points: Sequence[CostLine], alike: dict[Any, float], roof: float) -> Iterable[Law]:
    """The statistics of one tap over one sweep, smallest model first."""
    if points:
        yield _kept(points)
        yield _layers(points, alike)
    if len(points) >= 2:
        yield _scratch(points)
        yield _time(points, roof)
    if len(points) >= 4:
        yield _order(points)


def _kept(points: Sequence[CostLine]) -> Law:
    """What the largest point kept, where every point kept something: a table that is made once shows at one alone."""
    last = points[-1]
    kept = last.kept if all(line.kept > 0 for line in points) else 0.0
    words = f"keeps {last.kept / 1e6:.3g} MB beside its results at size {last.size}, and some at every size"
    return "kept", kept, float(KEPT_FLOOR_BYTES), words


def _scratch(points: Sequence[CostLine]) -> Law:
    before, last = points[-2], points[-1]
    grown, model = last.scratch - before.scratch, last.bytes - before.bytes
    slope = grown / model if model > 0 and last.scratch > SCRATCH_FLOOR_BYTES else 0.0
    words = (
        f"holds {last.scratch / 1e6:.4g} MB inside a call at size {last.size}, {slope:.3g} bytes more for each byte "
        f"that its cost model adds from size {before.size} on"
    )
    return "scratch", slope, SCRATCH, words


def _order(points: Sequence[CostLine]) -> Law:
    """How much steeper than the model the work grows over the upper half, as a difference of exponents; where the model
    does not grow, the exponent over the size."""
    half, last = points[len(points) // 2], points[-1]
    if not half.work or not last.work:
        return "order", 0.0, ORDER, ""
    spread = math.log(last.model / half.model)
    if FLAT < spread <= GROWS:
        return "order", 0.0, ORDER, ""  # the model's parts of different order weigh alike: no exponent says anything
    if spread > GROWS:
        excess = math.log((last.work / last.model) / (half.work / half.model)) / spread
        words = f"its work grows with the {1 + excess:.2f}th power of what its cost model says"
    else:
        excess = math.log(last.work / half.work) / math.log(last.size / half.size) if last.size > half.size else 0.0
        words = f"its work grows with the {excess:.2f}th power of the size, and its cost model does not"
    return "order", excess, ORDER, words


def _medians(lines: Iterable[CostLine]) -> dict[Any, float]:
    """The median of work per model over layers, by (operator, site, phase, sweep, size)."""
    found: dict[Any, list[float]] = {}
    for line in lines:
        if line.model > 0 and line.layer is not None:
            found.setdefault(_likeness(line), []).append(line.work / line.model)
    return {key: sorted(ratios)[len(ratios) // 2] for key, ratios in found.items() if len(ratios) >= 3}


def _likeness(line: CostLine) -> Any:
    return line.tap.partition(line.operator)[2], line.operator, line.phase, line.sweep, line.size


def _layers(points: Sequence[CostLine], alike: dict[Any, float]) -> Law:
    shares = [(line.work / line.model / alike[_likeness(line)], line) for line in points if alike.get(_likeness(line))]
    worst, line = max(shares, key=lambda pair: pair[0], default=(0.0, points[0]))
    return (
        "layers",
        worst,
        LAYERS,
        f"does {worst:.3g} times the work of the same operator in other layers at size {line.size}",
    )


def _time(points: Sequence[CostLine], roof: float) -> Law:
    timed = [line for line in points if line.seconds is not None]
    if len(timed) < 2 or roof <= 0:
        return "time", 0.0, SLOWEST, ""
    first, last = timed[0], timed[-1]
    longer, due = last.seconds - first.seconds, (last.model - first.model) / roof
    times = longer / due if due > 0 and longer > TIME_FLOOR_SECONDS else 0.0
    words = (
        f"takes {first.seconds * 1e3:.3g} ms at size {first.size} and {last.seconds * 1e3:.3g} ms at size {last.size}: "
        f"{times:.0f} times what its cost model adds at the speed of this machine"
    )
    return "time", times, SLOWEST, words
