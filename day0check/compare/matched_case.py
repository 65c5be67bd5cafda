"""The matched filter for a case of which a candidate showed its logits and nothing behind them."""

from __future__ import annotations

from typing import Any

from day0check.compare.free_choices import shows_no_choice
from day0check.compare.matched_answers import Heard, compare_answers, heard_logits
from day0check.contracts.profiles import Profile, profile_named
from day0check.snapshot import Snapshot
from day0check.types import Measure, RunCase

LOGITS = "head.logits"


def shows_logits_alone(snapshot: Snapshot) -> bool:
    """Whether there are logits and no choices that a pass of the reference could follow."""
    return LOGITS in snapshot.taps() and shows_no_choice(snapshot)


def compare_logits_of_case(
    model: Any, profile: Profile | str, case: RunCase, snapshot: Snapshot, *, device: str = "cpu", seed: int = 0
) -> list[Measure]:
    """As `compare_matched`, from the logits alone: every request with logits is a prompt."""
    profile = profile_named(profile) if isinstance(profile, str) else profile
    found = (_heard(snapshot, request.id, _images(request)) for request in case.requests)
    heard = [h for h in found if h is not None]
    return compare_answers(model, profile, heard, device=device, order=snapshot.first_order(LOGITS), seed=seed)


def _images(request: Any) -> tuple[str, ...]:
    return tuple(image for turn in request.turns for image in turn.images)


def _heard(snapshot: Snapshot, request: str, images: tuple[str, ...]) -> Heard | None:
    outputs = snapshot.outputs
    sequence = () if outputs is None else outputs.sequences.get(request, ())
    recorded = snapshot.recorded(LOGITS, request)
    inside = [i for i, position in enumerate(recorded.positions) if position < len(sequence)]
    if not inside:
        return None
    rows = [recorded.positions[i] for i in inside]
    return heard_logits(sequence[: max(rows) + 1], rows, recorded.values[inside].flatten(1), images)
