"""What must hold around experts that give back their input, whatever the weights are.

Pairs: those that reach an expert are exactly those of the router, each once. Scaling: what is summed is the routed
input times the sum of the row's weights, which is the routed scaling factor where weights are renormalised.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from day0check.compare.net_measures import layer_of
from day0check.snapshot import Entry, Snapshot
from day0check.types import Measure
from reference.config import ModelConfig

ROUTE, SCORES, DISPATCH, EXPERTS, COMBINE = "moe.route", "moe.scores", "moe.dispatch", "moe.experts", "moe.combine"
_NARROW, _WIDE = 2.0, 64.0  # in units of the type's eps: two nearest roundings of a product; a sum of float32


@dataclass(frozen=True)
class Step:
    """The results of one layer in one step: by operator its entry and tensors."""

    entries: dict[str, Entry]
    values: dict[str, list[torch.Tensor]]


def experts_law(here: Snapshot, config: ModelConfig) -> tuple[list[Measure], str]:
    """(measures, what is missing in words): two measures per layer and phase, the worst of its steps."""
    found: dict[tuple[str, str, str], Measure] = {}
    layers = [layer for layer in range(len(config.layers)) if config.is_moe(layer)]
    for layer in layers:
        place = f"layers.{layer:02d}"
        steps = _steps(here, place)
        if not steps:
            return list(found.values()), f"the router and its dispatch were not seen in layer {layer}"
        for step in steps:
            for measure in (_pairs(step, place), scaling(step, place, config)):
                key = (measure.tap, measure.phase, measure.operator)
                if key not in found or (found[key].passed and worse(measure, found[key])):
                    found[key] = measure
    return sorted(found.values(), key=lambda m: (m.order, m.tap)), ""


def worse(a: Measure, b: Measure) -> bool:
    """Whether `a` rather than `b` is to be told."""
    return not a.passed or a.statistics.get("factor", 0.0) > b.statistics.get("factor", 0.0)


def _steps(here: Snapshot, place: str) -> list[Step]:
    """The steps of a layer; empty when in one of them not all five operators were seen, each once."""
    by_step: dict[tuple[int, str], Step] = {}
    for operator in (ROUTE, SCORES, DISPATCH, EXPERTS, COMBINE):
        for entry, value in here.results(f"{place}.{operator}"):
            step = by_step.setdefault((entry.step, entry.phase), Step({}, {}))
            step.entries.setdefault(operator, entry)
            step.values.setdefault(operator, []).append(value)
    whole = all(len(step.entries) == 5 and len(step.values[DISPATCH]) == 4 for step in by_step.values())
    return list(by_step.values()) if whole else []


def _pairs(step: Step, place: str) -> Measure:
    ids = step.values[ROUTE][0].long()
    _, order, active, offsets = step.values[DISPATCH]
    k = ids.shape[1]
    counts = offsets[1:] - offsets[:-1]
    expert = active.long().repeat_interleave(counts.long())
    wanted = {(n // k, n % k): int(e) for n, e in enumerate(ids.flatten().tolist()) if e >= 0}
    computed = list(zip(order.tolist(), expert.tolist(), strict=False))
    seen: dict[tuple[int, int], int] = {}
    wrong = len(order) - len(expert) if len(order) > len(expert) else 0
    row = None
    for number, which in computed:
        pair = (number // k, number % k)
        if pair in seen or wanted.get(pair) != which:
            wrong, row = wrong + 1, pair[0] if row is None else row
        seen[pair] = which
    left_out = [pair for pair in wanted if pair not in seen]
    if left_out and row is None:
        row = left_out[0][0]
    rows = len(step.values[EXPERTS][0])
    wrong += len(left_out) + abs(rows - len(order))
    message = f"of {len(wanted)} pairs of row and expert {wrong} are not computed exactly once by their expert"
    return _measure(
        step, f"{place}.{DISPATCH}", DISPATCH, {"wrong_pairs": float(wrong)}, {"wrong_pairs": 0.0}, row, message
    )


def scaling(step: Step, place: str, config: ModelConfig) -> Measure:
    """How often the weights of the router are applied in a step of layer `place`, by the worst of its rows."""
    m, ids = config.moe, step.values[ROUTE][0].long()
    y, order, _, _ = step.values[DISPATCH]
    k = ids.shape[1]
    rows = order // k
    routed = torch.zeros(len(ids), y.shape[1], dtype=torch.float64)
    routed[rows] = y.double()  # every pair of a row holds the same input
    combined = step.values[COMBINE][0].double()
    scores = step.values[SCORES][0].double()
    chosen = torch.where(ids >= 0, scores.gather(1, ids.clamp(min=0)), 0.0)
    weights = chosen / chosen.sum(-1, keepdim=True).clamp(min=1e-20) if m.renormalise else chosen
    expected = weights.sum(-1) * m.scale
    power = routed.square().sum(-1)
    valid = (power > 0) & (expected > 0)
    factor = (combined * routed).sum(-1) / power.clamp(min=1e-300)
    off = torch.where(valid, (factor / expected.clamp(min=1e-300) - 1).abs(), 0.0)
    dtype = step.values[COMBINE][0].dtype
    limit = torch.finfo(dtype).eps * (_WIDE if dtype == torch.float32 else _NARROW)
    worst = int(off.argmax())
    value = float(off[worst]) if bool(torch.isfinite(off).all()) else float("inf")
    message = f"identity experts are summed to {float(factor[worst]):.4g} times their input"
    message += f", {float(expected[worst]):.4g} is due"
    row = worst if not value <= limit else None
    return _measure(step, f"{place}.{COMBINE}", COMBINE, {"factor": value}, {"factor": limit}, row, message)


def _measure(
    step: Step,
    tap: str,
    operator: str,
    statistics: dict[str, float],
    limits: dict[str, float],
    row: int | None,
    message: str,
) -> Measure:
    (name,) = statistics
    passed = statistics[name] <= limits[name]
    entry, rows = step.entries[operator], step.entries[ROUTE]
    request = position = None
    if not passed and row is not None and row < len(rows.owner) and rows.owner[row] >= 0:
        request, position = rows.requests[rows.owner[row]], rows.position[row]
    return Measure(
        tap=tap,
        operator=operator,
        kind="move" if operator == DISPATCH else "compute",
        phase=entry.phase,
        layer=layer_of(tap),
        order=entry.order,
        rows=len(rows.owner),
        elements=len(rows.owner),
        passed=passed,
        statistics=statistics,
        limits=limits,
        failing="" if passed else name,
        request=request,
        position=position,
        pattern="" if passed else name.replace("_", " "),
        message="" if passed else message,
    )
