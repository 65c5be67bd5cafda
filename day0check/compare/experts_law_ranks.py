"""`experts_law` where the model is cut over ranks: the records of all of them are asked together.

Pairs are counted over all ranks that hold experts whole, and on each rank where every rank has a part of each expert.
The scaling is asked where weights are applied: of each rank's own rows, and of the sum over ranks where every rank
computes the pairs of its own experts for all rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from day0check.compare.experts_law import COMBINE, DISPATCH, ROUTE, SCORES, Step, scaling, worse
from day0check.compare.merge import EXCHANGES, merged_measures, read_lines
from day0check.compare.merge_exchanges import pair_measures
from day0check.snapshot import Snapshot
from day0check.types import Measure
from reference.config import ModelConfig

_SEEN = (ROUTE, SCORES, DISPATCH, COMBINE)
At = tuple[int, str]  # step and phase


def experts_law_of_ranks(
    folders: Sequence[Path], config: ModelConfig, *, layout: Mapping[str, Any]
) -> tuple[list[Measure], str]:
    """(measures, what is missing in words) from the snapshots of one run with identity experts on every rank.

    `layout`: that of ranks.json. For each layer and phase three measures: pairs, whose results are summed, scaling.
    """
    lines = [read_lines(folder / EXCHANGES) for folder in folders]
    for rank, mine in enumerate(lines):
        if not mine:
            return [], f"rank {rank} recorded no pairs of row and expert in this run"
    expert_parallel = layout.get("expert", 1) > 1
    found = pair_measures(lines, expert_parallel=expert_parallel)
    counted = {(m.layer, m.phase) for m in found if m.tap.endswith(".once")}
    summed = expert_parallel and layout.get("dispatch") == "reduce"
    snapshots = [Snapshot(folder) for folder in folders]
    for layer in (number for number in range(len(config.layers)) if config.is_moe(number)):
        place = f"layers.{layer:02d}"
        ranks = [_steps(snapshot, place) for snapshot in snapshots]
        torn = (
            None if summed else next((n for n, steps in enumerate(ranks) if not all(map(_whole, steps.values()))), None)
        )
        if torn is not None:
            return (
                found,
                f"of layer {layer} rank {torn} shows the router without its pairs and their sum, or these alone",
            )
        measures = _of_sums(ranks, place, config) if summed else _of_rows(ranks, place, config)
        due = {phase for steps in ranks for _, phase in steps}
        judged = {m.phase for m in measures} & {phase for number, phase in counted if number == layer}
        if not due or due != judged:
            return [*found, *measures], f"the router, its pairs and their sum were not seen in layer {layer}"
        found += measures
    return sorted(found, key=lambda m: (m.order, m.tap)), ""


def _steps(here: Snapshot, place: str) -> dict[At, Step]:
    """What a rank has of each step of a layer: a rank without rows or pairs lacks some of it."""
    found: dict[At, Step] = {}
    for operator in _SEEN:
        for entry, value in here.results(f"{place}.{operator}"):
            step = found.setdefault((entry.step, entry.phase), Step({}, {}))
            step.entries.setdefault(operator, entry)
            step.values.setdefault(operator, []).append(value)
    return found


def _of_rows(ranks: Sequence[dict[At, Step]], place: str, config: ModelConfig) -> list[Measure]:
    """Each rank routes rows and sums their results itself."""
    return merged_measures([_worst(list(steps.values()), place, config) for steps in ranks])


def _of_sums(ranks: Sequence[dict[At, Step]], place: str, config: ModelConfig) -> list[Measure]:
    """Every rank routes all rows; the sum over ranks of what each combines is the whole."""
    members: dict[At, list[Step]] = defaultdict(list)
    for steps in ranks:
        for at, step in steps.items():
            members[at].append(step)
    return _worst([whole for at in members if (whole := _together(members[at])) is not None], place, config)


def _whole(step: Step) -> bool:
    return all(step.values.get(operator) for operator in _SEEN) and len(step.values[DISPATCH]) == 4


def _together(steps: Sequence[Step]) -> Step | None:
    """One step of all ranks: routed inputs of every pair, and the sum of their parts in the parts' dtype."""
    computing = [step for step in steps if _whole(step)]
    if not computing:
        return None
    first = computing[0]
    rows, order = (torch.cat([step.values[DISPATCH][n] for step in computing]) for n in (0, 1))
    parts = [step.values[COMBINE][0] for step in computing]
    total = torch.stack([part.double() for part in parts]).sum(0).to(parts[0].dtype)
    return Step(first.entries, {**first.values, DISPATCH: [rows, order, *first.values[DISPATCH][2:]], COMBINE: [total]})


def _worst(steps: Sequence[Step], place: str, config: ModelConfig) -> list[Measure]:
    """The worst measure of the scaling in each phase."""
    found: dict[str, Measure] = {}
    for step in steps:
        measure = scaling(step, place, config)
        if measure.phase not in found or (found[measure.phase].passed and worse(measure, found[measure.phase])):
            found[measure.phase] = measure
    return list(found.values())
