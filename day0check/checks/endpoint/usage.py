"""Usage against what was sent and what came: prompt tokens, completion tokens, and their sum."""

from __future__ import annotations

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed
from day0check.load.records import Exchange
from day0check.types import Finding

QUESTION = "Does usage count what was really sent and generated?"
NAME = "endpoint.usage"
MOST_SPECIAL = 2  # tokens that an endpoint may put around a prompt of token ids


def judge(observed: Observed) -> Answer:
    """One finding per kind of miscount."""
    counted = [
        e for e in observed.exchanges if e.good and e.answer.usage is not None and not e.label.startswith("bad/")
    ]
    findings = [f for rule in (_sums, _completion, _both_ways) if (f := rule(counted)) is not None]
    findings += _prompt(observed)
    return answered(
        NAME,
        findings,
        f"the usage of {len(counted)} answers is right",
        not_run="" if counted else "no answer came with usage",
    )


def _sums(exchanges: list[Exchange]) -> Finding | None:
    for e in exchanges:
        u = e.answer.usage
        if u.total_tokens is not None and u.total_tokens != u.prompt_tokens + u.completion_tokens:
            text = f"{e.label!r}: total_tokens is {u.total_tokens}, not {u.prompt_tokens} + {u.completion_tokens}"
            return found(NAME, "sum", text, label=e.label)
    return None


def _completion(exchanges: list[Exchange]) -> Finding | None:
    """Against the tokens that came with log-probabilities or ids; the end token itself may be counted and not shown."""
    for e in exchanges:
        a, asked = e.answer, e.asked
        came = len(a.token_ids) or len(a.tokens)
        if not came or asked.get("stop") or a.choices != 1 or asked.get("echo") or asked.get("n", 1) != 1:
            continue
        allowed = (came, came + 1) if a.finish != "length" else (came,)
        if a.usage.completion_tokens not in allowed:
            text = f"{e.label!r}: usage says {a.usage.completion_tokens} tokens were generated, {came} came"
            return found(NAME, "completion", text, label=e.label, value=a.usage.completion_tokens, limit=came)
    for e in exchanges:
        most = e.asked.get("max_tokens")
        came = len(e.answer.token_ids) or len(e.answer.tokens)
        if (
            most
            and e.label != "max_tokens"
            and e.answer.choices == 1
            and not came
            and e.answer.usage.completion_tokens > most
        ):
            text = f"{e.label!r}: usage says {e.answer.usage.completion_tokens} tokens, only {most} were allowed"
            return found(NAME, "completion", text, label=e.label, value=e.answer.usage.completion_tokens, limit=most)
    return None


def _both_ways(exchanges: list[Exchange]) -> Finding | None:
    by_label = {e.label: e for e in exchanges}
    for label, whole in by_label.items():
        kind, _, key = label.partition("/")
        stream = by_label.get(f"stream/{key}") if kind == "whole" else None
        if stream is None or stream.answer.text != whole.answer.text:
            continue
        a, b = whole.answer.usage, stream.answer.usage
        if (a.prompt_tokens, a.completion_tokens) != (b.prompt_tokens, b.completion_tokens):
            text = (
                f"{stream.label!r}: usage {b.prompt_tokens} + {b.completion_tokens} streamed, "
                f"{a.prompt_tokens} + {a.completion_tokens} whole, for one prompt and one answer"
            )
            return found(NAME, "both ways", text, label=stream.label)
    return None


def _prompt(observed: Observed) -> list[Finding]:
    """Two prompts of token ids: their counts are known, but for special tokens that both have."""
    pair = [observed.get(label) for label in ("token_ids", "token_ids_longer")]
    if any(e is None or not e.good or e.answer.usage is None for e in pair):
        return []
    sent = [len(e.asked["prompt"]) for e in pair]
    said = [e.answer.usage.prompt_tokens for e in pair]
    extra = said[0] - sent[0]
    if said[1] - sent[1] == extra and 0 <= extra <= MOST_SPECIAL:
        return []
    text = f"prompts of {sent[0]} and {sent[1]} token ids are counted as {said[0]} and {said[1]} tokens"
    return [found(NAME, "prompt", text, label="token_ids", value=said[0], limit=sent[0])]
