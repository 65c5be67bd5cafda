"""Greedy answers of the endpoint against the reference, which follows the endpoint's own tokens."""

from __future__ import annotations

from day0check.checks.endpoint_answer import answered, found
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed

QUESTION = "Are the endpoint's tokens and log-probabilities those of the reference?"
NAME = "endpoint.oracle"


def judge(observed: Observed) -> Answer:
    """Each row is one answer that the reference followed: see `compare/wire.py` for its statistics and limits."""
    rows = observed.reference
    if not rows:
        return answered(
            NAME, (), "", not_run=observed.reference_reason or "no answer could be followed by the reference"
        )
    findings = []
    wrong = [r for r in rows if r.margin > r.margin_limit]
    if wrong:
        first = max(wrong, key=lambda r: r.margin)
        text = (
            f"{len(wrong)} of {len(rows)} greedy answers leave the reference's at a choice that rounding in "
            f"{observed.profile} does not explain: {first.label!r} at token {first.margin_at} gives up "
            f"{first.margin:.3g} noises (limit {first.margin_limit:g})"
        )
        findings.append(
            found(
                NAME,
                "token",
                text,
                label=first.label,
                value=first.margin,
                limit=first.margin_limit,
                token=first.margin_at,
            )
        )
    moved = [r for r in rows if r.delta is not None and r.delta > r.delta_limit]
    if moved:
        first = max(moved, key=lambda r: r.delta / r.delta_limit)
        text = (
            f"the log-probabilities of {len(moved)} of {len(rows)} answers are not the reference's: {first.label!r} at "
            f"token {first.delta_at} is off by {first.delta:.3g} nats (limit {first.delta_limit:.3g})"
        )
        findings.append(
            found(
                NAME,
                "logprob",
                text,
                operator="serve.logprobs",
                label=first.label,
                value=first.delta,
                limit=first.delta_limit,
                token=first.delta_at,
            )
        )
    drifted = [r for r in rows if r.rms is not None and r.rms > r.rms_limit and r not in moved]
    if drifted and not moved:
        first = max(drifted, key=lambda r: r.rms)
        text = (
            f"the log-probabilities of {len(drifted)} of {len(rows)} answers lie {first.rms:.3g} nats from the "
            f"reference's on the average, {first.label!r} most (limit {first.rms_limit:.3g})"
        )
        findings.append(found(NAME, "logprobs", text, label=first.label, value=first.rms, limit=first.rms_limit))
    tokens = sum(r.tokens for r in rows)
    compared = sum(r.delta is not None for r in rows)
    summary = (
        f"{tokens} tokens of {len(rows)} answers are the reference's, log-probabilities of {compared} answers compared"
    )
    return answered(NAME, findings, summary)
