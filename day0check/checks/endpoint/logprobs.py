"""Log-probabilities that cannot be, whatever the model: each answer by itself, no reference needed."""

from __future__ import annotations

import math
from collections.abc import Iterator

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.endpoint.compare import MARGIN_LIMITS, OTHER_MARGIN
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed
from day0check.load.records import Exchange, Token
from day0check.types import Finding

QUESTION = "Are log-probabilities those of a distribution, and is a greedy token its best?"
NAME = "endpoint.logprobs"
LARGEST_VOCABULARY = 1 << 22  # the best of so many tokens has at least the mean probability
MOST_SUM = 1.001  # of the probabilities of different tokens, as sums of rounded numbers


def judge(observed: Observed) -> Answer:
    """Greedy answers only for what must be the best; every answer for what must be a probability."""
    seen = [e for e in observed.exchanges if e.good and e.answer.tokens and not e.label.startswith("bad/")]
    findings: dict[str, Finding] = {}
    counts: dict[str, int] = {}
    for e in seen:
        for finding in _wrongs(e, observed.profile):
            findings.setdefault(finding.id, finding)
            counts[finding.id] = counts.get(finding.id, 0) + 1
    tokens = sum(len(e.answer.tokens) for e in seen)
    summary = f"log-probabilities of {tokens} tokens in {len(seen)} answers are possible ones"
    if not seen:
        summary = "no answer came with log-probabilities"
    return answered(NAME, list(findings.values()), summary, not_run="" if observed.exchanges else "nothing was asked")


def _wrongs(e: Exchange, profile: str) -> Iterator[Finding]:
    greedy = e.asked.get("temperature") == 0 and not e.asked.get("forced_token_ids") and not e.asked.get("echo")
    lowest = -math.log(LARGEST_VOCABULARY)
    margin = MARGIN_LIMITS.get(profile, OTHER_MARGIN)
    for place, token in enumerate(e.answer.tokens):
        if token.logprob is None:
            continue
        where = f"{e.label!r}, token {place}: the log-probability"
        if not token.logprob <= 1e-3:
            yield _found("not a probability", f"{where} is {token.logprob:g}", e, token.logprob, 0.0)
        elif greedy and token.logprob < lowest:
            text = f"{where} of the most likely token is {token.logprob:g}, less than one of {LARGEST_VOCABULARY} equal"
            yield _found("impossible", text, e, token.logprob, lowest)
        elif greedy and token.top and token.logprob < token.top[0][1] - margin:
            text = f"{where} is {token.top[0][1] - token.logprob:.3g} nats below that of {token.top[0][0]!a}"
            yield _found("not the best", text, e, token.logprob, token.top[0][1])
        elif (total := _sum(token)) > MOST_SUM:
            yield _found("sum", f"{where}s of different tokens sum to a probability of {total:.4g}", e, total, 1.0)


def _sum(token: Token) -> float:
    """Of the alternatives and the token itself, each once; texts that stand twice may be different tokens."""
    return sum(math.exp(min(value, 1.0)) for value in dict(token.top).values())


def _found(pattern: str, message: str, e: Exchange, value: float, limit: float) -> Finding:
    return found(NAME, pattern, message, operator="serve.logprobs", label=e.label, value=value, limit=limit)
