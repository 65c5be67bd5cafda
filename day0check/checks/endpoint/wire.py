"""The same greedy prompt whole and streamed, twice each: one text, one finish reason, and the same again."""

from __future__ import annotations

from day0check.checks.endpoint.answer import answered, found
from day0check.checks.endpoint.compare import MARGIN_LIMITS, OTHER_MARGIN, difference, full_text, shown
from day0check.checks.evidence import Answer
from day0check.load.observed import Observed
from day0check.load.records import Exchange
from day0check.types import Finding

QUESTION = "Is a streamed answer the whole answer, character by character, and is it the same when asked again?"
NAME = "endpoint.wire"


def judge(observed: Observed) -> Answer:
    """Only prompts whose whole answer repeats itself can show that a stream differs."""
    differing, steady = differing_streams(observed)
    finishes = [(a, b) for a, b in steady if (a, b) not in differing and a.answer.finish != b.answer.finish]
    unrepeated = [(a, b) for a, b in _repeated(observed) if difference(a.answer, b.answer).text_at is not None]
    compared = len(steady)
    findings = [
        *_streams(differing, compared),
        *_finish(finishes),
        *_lengths(observed),
        *_repeats(unrepeated, observed),
    ]
    not_run = "" if compared or unrepeated else "no prompt was answered both ways"
    return answered(NAME, findings, f"{compared} prompts: streamed and whole answers are one", not_run=not_run)


Pairs = list[tuple[Exchange, Exchange]]


def differing_streams(observed: Observed) -> tuple[Pairs, Pairs]:
    """(whole, streamed) of the prompts whose two texts differ, and of all prompts whose whole answer repeats itself."""
    stream = observed.under("stream")
    steady = []
    for one, again in _repeated(observed):
        two = stream.get(one.label.partition("/")[2])
        if two is not None and two.good and difference(one.answer, again.answer).text_at is None:
            steady.append((one, two))
    return [(a, b) for a, b in steady if full_text(a.answer) != full_text(b.answer)], steady


def _repeated(observed: Observed) -> Pairs:
    """Whole answers and their repeats, where both came."""
    again = observed.under("whole_again")
    return [(e, again[k]) for k, e in observed.under("whole").items() if e.good and k in again and again[k].good]


def _streams(pairs: list[tuple[Exchange, Exchange]], compared: int) -> list[Finding]:
    if not pairs:
        return []
    one, two = pairs[0]
    a, b = full_text(one.answer), full_text(two.answer)
    at = difference(one.answer, two.answer).text_at or 0
    message = (
        f"{len(pairs)} of {compared} streamed answers differ from the whole ones: in {two.label!r} from character {at} "
        f"on the stream has {shown(b, at)}, the whole answer {shown(a, at)}"
    )
    labels = [e.label for _, e in pairs]
    return [found(NAME, "stream", message, operator="serve.detokenise", label=two.label, character=at, labels=labels)]


def _finish(pairs: list[tuple[Exchange, Exchange]]) -> list[Finding]:
    if not pairs:
        return []
    one, two = pairs[0]
    message = f"{two.label!r} ends with {two.answer.finish!r} streamed and {one.answer.finish!r} whole"
    return [found(NAME, "finish", message, operator="serve.stop", label=two.label)]


def _lengths(observed: Observed) -> list[Finding]:
    """An answer that used up its tokens ends with "length"."""
    for e in observed.exchanges:
        usage, most = e.answer.usage, e.asked.get("max_tokens")
        if not e.good or usage is None or e.label.startswith("bad/") or e.label == "n" or e.asked.get("stop"):
            continue
        counted = len(e.answer.tokens) or len(e.answer.token_ids)
        if counted == most == usage.completion_tokens and e.answer.finish not in ("length", "tool_calls"):
            if e.answer.finish == "stop" and not _always_stops(observed, most):
                continue  # the end token may be the last one allowed
            message = f"{e.label!r} used all of its {most} tokens and ends with {e.answer.finish!r}, not 'length'"
            return [found(NAME, "finish reason", message, operator="serve.stop", label=e.label)]
    return []


def _always_stops(observed: Observed, most: int) -> bool:
    """Whether every answer that used all of its tokens says "stop": that many end tokens in the last place are none."""
    full = [
        e
        for e in observed.exchanges
        if e.good and not e.asked.get("stop") and len(e.answer.tokens) == e.asked.get("max_tokens")
    ]
    return len(full) >= 4 and all(e.answer.finish == "stop" for e in full)


def _repeats(pairs: list[tuple[Exchange, Exchange]], observed: Observed) -> list[Finding]:
    """A repeat that parts at a clear choice is wrong; one that parts at a tie, or nobody knows where, is a warning."""
    if not pairs:
        return []
    clear = [(a, b) for a, b in pairs if difference(a.answer, b.answer).beyond(observed.profile)]
    one, two = (clear or pairs)[0]
    apart = difference(one.answer, two.answer)
    limit = MARGIN_LIMITS.get(observed.profile, OTHER_MARGIN)
    why = f" at a choice that was clear by {apart.margin:.3g} nats" if clear and apart.margin is not None else ""
    who = "1 prompt gets" if len(pairs) == 1 else f"{len(pairs)} prompts get"
    message = f"{who} another answer when asked again alone at temperature 0, {two.label!r} first{why}"
    return [
        found(
            NAME,
            "repeat",
            message,
            severity="blocker" if clear else "warning",
            label=two.label,
            value=apart.margin,
            limit=limit,
        )
    ]
