"""What must hold where image features enter the text: the n-th pad takes the n-th feature, and nothing else moves."""

from __future__ import annotations

import torch

from day0check.snapshot import Rows, Snapshot
from day0check.types import Measure, Request
from reference.config import ModelConfig

EMBED, MERGE = "embed.tokens", "splice.merge"


def splice_law(here: Snapshot, config: ModelConfig, requests: tuple[Request, ...]) -> tuple[list[Measure], str]:
    """(measures, what is missing in words): one measure for each request with images, by bytes."""
    towers = [tap for tap in here.taps() if tap.startswith("vision.")]
    pictured = [r.id for r in requests if any(turn.images for turn in r.turns)]
    if not towers or MERGE not in here.taps() or EMBED not in here.taps():
        return [], "the tower, the embedding or the splice was not seen"
    last = max(towers, key=here.first_order)
    found = []
    for request in pictured:
        measure = _one(here, last, request, config.tokens.media_pad)
        if measure is None:
            return found, f"no spliced row of request {request} was seen"
        found.append(measure)
    return found, ""


def _one(here: Snapshot, last: str, request: str, pad: int) -> Measure | None:
    features = here.recorded(last, request, by_position=False)
    merged, plain = here.recorded(MERGE, request), here.recorded(EMBED, request)
    if not merged.positions:
        return None
    sequence = here.outputs.sequences[request]
    pads = [p for p, token in enumerate(sequence) if token == pad]
    at = {p: n for n, p in enumerate(pads)}
    own = {p: n for n, p in enumerate(plain.positions)}
    wrong = [
        p
        for n, p in enumerate(merged.positions)
        if not _is_due(merged.values[n], at.get(p), own.get(p), features, plain)
    ]
    wrong += [p for p in pads if p not in set(merged.positions)]
    count = len(wrong) + abs(len(features.positions) - len(pads))
    message = f"{count} rows are not the feature of their pad or the embedding of their token"
    if len(features.positions) != len(pads):
        message = f"{len(features.positions)} features for {len(pads)} media pads; {message}"
    return Measure(
        tap=MERGE,
        operator=MERGE,
        kind="move",
        phase="prefill",
        layer=None,
        order=min(merged.orders),
        rows=len(merged.positions),
        elements=merged.values.numel(),
        passed=not count,
        statistics={"wrong_rows": float(count)},
        limits={"wrong_rows": 0.0},
        failing="wrong_rows" if count else "",
        request=request,
        position=min(wrong, default=pads[0] if pads else None) if count else None,
        pattern="wrong rows" if count else "",
        message=message if count else "",
    )


def _is_due(row: torch.Tensor, feature: int | None, own: int | None, features: Rows, plain: Rows) -> bool:
    if feature is not None:
        due = features.values[feature] if feature < len(features.positions) else None
    else:
        due = plain.values[own] if own is not None else None
    return due is not None and torch.equal(row.flatten(), due.to(row.dtype).flatten())
