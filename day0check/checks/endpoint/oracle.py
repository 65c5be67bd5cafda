"""Greedy answers of the endpoint against the reference, which follows the endpoint's own tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed
from day0check.types import Finding, Measure

QUESTION = "Are the endpoint's tokens and log-probabilities those of the reference?"
NAME = "endpoint.oracle"
WORDS = {
    "given_up": "chooses a token {0:.3g} nats below the best (limit {1:.3g})",
    "differing": "has {0:.0%} tokens that are not the best (limit {1:.0%})",
    "median": "has log-probabilities that are off by {0:.3g} nats in the median (limit {1:.3g})",
    "ninety": "has log-probabilities of which a tenth is off by more than {0:.3g} nats (limit {1:.3g})",
}


def judge(observed: Observed) -> Answer:
    """Each row is one answer that the reference followed: see `compare/wire.py` for its statistics and limits."""
    rows = observed.reference
    if not rows:
        return answered(
            NAME, (), "", not_run=observed.reference_reason or "no answer could be followed by the reference"
        )
    findings = []
    for pattern, names in (("token", ("given_up", "differing")), ("logprob", ("median", "ninety"))):
        wrong = [r for r in rows if any(not r.statistics.get(n, 0.0) <= r.limits.get(n, 0.0) for n in names)]
        if wrong:
            findings.append(_finding(pattern, names, wrong, observed, len(rows)))
    if observed.matched is not None and not observed.matched.passed:
        findings.insert(0, _parameter(observed.matched))
    tokens = sum(r.tokens for r in rows)
    compared = sum("median" in r.statistics for r in rows)
    summary = (
        f"{tokens} tokens of {len(rows)} answers are the reference's, log-probabilities of {compared} answers compared"
    )
    return answered(NAME, findings, summary, not_run=observed.reference_reason)


def _parameter(told: Measure) -> Finding:
    """The parameter that the error of all answers looks like: what they say together, and no answer by itself."""
    return replace(
        found(
            NAME,
            told.pattern,
            told.message,
            operator=told.operator,
            value=told.statistics[told.failing],
            limit=told.limits[told.failing],
            statistics=dict(sorted(told.statistics.items())),
        ),
        layer=told.layer,
        power=told.power,
        stack_layer="operator",
    )


def _finding(pattern: str, names: tuple[str, ...], wrong: list, observed: Observed, total: int) -> Finding:
    def excess(row: Any, name: str) -> float:
        return row.statistics.get(name, 0.0) / row.limits[name] if name in row.limits else 0.0

    first = max(wrong, key=lambda r: max(excess(r, n) for n in names))
    name = max(names, key=lambda n: excess(first, n))
    at = first.given_up_at if pattern == "token" else first.moved_at
    text = (
        f"{len(wrong)} of {total} answers differ from the reference more than rounding in {observed.profile} explains: "
        f"{first.label!r} {WORDS[name].format(first.statistics[name], first.limits[name])}, most at token {at}"
    )
    return found(
        NAME,
        pattern,
        text,
        label=first.label,
        value=first.statistics[name],
        limit=first.limits[name],
        token=at,
        rows=[{"label": r.label, **r.statistics} for r in wrong],
    )
