"""What must hold where attention is computed in parts: merged, they are what attention to all keys at once gives.

Two runs of the same steps, one with partial results and one without, are alike byte for byte up to the first layer that
attends to every key. There its results differ by their own roundings alone: of the parts, of the probabilities, of
the merged result and of the whole one, each at most half a unit, however the noise of the model grows behind it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from day0check.compare.locate import split_tap
from day0check.contracts import CONTRACTS
from day0check.snapshot import Snapshot
from day0check.types import Measure, Request
from reference.config import ModelConfig

MERGED = "mla.merge"
WHOLE = {"mla": "mla.attention", "gqa": "gqa.attention"}  # kind of layer: its attention to all keys
UNITS = 4.0  # of relative error of a row: one rounding each, none of which reaches it in the mean
FLOAT32 = 2.0**-16  # what float32 sums and exponentials of scores may add


def parts_law(
    here: Snapshot, there: Snapshot, config: ModelConfig, requests: Iterable[Request]
) -> tuple[list[Measure], str]:
    """(measures, what is missing in words) of `here`, a run with partial results, against `there`, one without.

    One measure for the first layer that attends to every key; none where the runs differ before it, whose
    roundings are then not theirs alone, and none where nothing was merged.
    """
    layer = next(number for number, kind in enumerate(config.layers) if kind in WHOLE)
    merged, whole = (f"layers.{layer:02d}.{name}" for name in (MERGED, WHOLE[config.layers[layer]]))
    if merged not in here.taps() or not _alike_before(here, there, layer, requests):
        return [], ""
    found: list[tuple[float, str, int]] = []
    elements, unit = 0, 0.0
    for request in requests:
        mine, theirs = here.recorded(merged, request.id), there.recorded(whole, request.id)
        at = {position: row for row, position in enumerate(theirs.positions)}
        lacking = [position for position in mine.positions if position not in at]
        if lacking:
            return [], f"{whole} of request {request.id} at position {lacking[0]} was not seen"
        if not mine.positions:
            continue
        a, b = mine.values.flatten(1), theirs.values[[at[p] for p in mine.positions]].flatten(1)
        if a.shape != b.shape:
            return [], f"{merged} has {a.shape[1]} elements a row, {whole} {b.shape[1]}"
        unit, elements = torch.finfo(a.dtype).eps / 2, elements + a.numel()
        error = (a.double() - b.double()).norm(dim=1) / b.double().norm(dim=1).clamp(min=2.0**-126)
        error = torch.nan_to_num(error, nan=float("inf"))
        found += [(float(e), request.id, p) for e, p in zip(error, mine.positions, strict=True)]
    return [_measure(here, merged, layer, found, elements, UNITS * unit + FLOAT32)] if found else [], ""


def _alike_before(here: Snapshot, there: Snapshot, layer: int, requests: Iterable[Request]) -> bool:
    """Whether every travelling result in front of a layer has the same bytes in both runs."""
    for tap in here.taps():
        place, operator = split_tap(tap)[:2]
        if operator not in CONTRACTS or not CONTRACTS[operator].net or not _in_front(place, operator, layer):
            continue
        for request in requests:
            a, b = here.recorded(tap, request.id), there.recorded(tap, request.id)
            if a.positions != b.positions or not torch.equal(a.values, b.values):
                return False
    return True


def _in_front(place: str, operator: str | None, layer: int) -> bool:
    if place.startswith("layers."):
        return int(place[len("layers.") :]) < layer
    return not place and operator == "embed.tokens"


def _measure(
    here: Snapshot, tap: str, layer: int, found: list[tuple[float, str, int]], elements: int, limit: float
) -> Measure:
    worst, request, position = max(found)
    wrong = sum(error > limit for error, _, _ in found)
    message = (
        f"{wrong} of {len(found)} merged rows are not what attention to all keys gives, the worst off by {worst:.3g}"
    )
    return Measure(
        tap=tap,
        operator=MERGED,
        kind="compute",
        phase="prefill",
        layer=layer,
        order=min(here.first_order(t) for t in here.taps() if t.startswith(tap.removesuffix(MERGED))),  # of its layer
        rows=len(found),
        elements=elements,
        passed=not wrong,
        statistics={"parts": worst},
        limits={"parts": limit},
        failing="parts" if wrong else "",
        request=request,
        position=position,
        pattern="not the whole" if wrong else "",
        message=message if wrong else "",
    )
