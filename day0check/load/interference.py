"""Prompts alone, and then beside others in every way that may disturb an answer: together, long prompts injected into
running answers, a warm prefix, memory that runs short, clients that leave. Nothing is judged here.

Labels: `alone/i`, `again/i`, `together/r/i`, `long/j`, `prefix/cold/i`, `prefix/warm/i`, `surge/together/r.i`,
`surge/alone/r.i`, `surge/beside/r.i`, `cancel/j`, `after_cancel/i`. The server's own counters stand under "before_…",
"after_…", and the most that was seen of each while requests were in flight under "peak_…".
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from day0check.load import asks
from day0check.load.asks import Dialect
from day0check.load.prompts import MULTIBYTE, canary, unique
from day0check.load.records import Exchange
from day0check.load.scenario import FAULTY, Asker, GivenUp, settled

FEWEST_FOR_SURGE = 8  # requests at once; fewer cannot fill a cache
PREFIX_WORDS, SURGE_WORDS = 160, 96
SURGE_ROUNDS, MOST_GROWTH, MOST_AT_ONCE = 3, 12.0, 64
FEWEST_COMPARED, MOST_COMPARED = 8, 16  # requests of a surge that are asked alone, too
SURGE_SHARE = 0.25  # of the time that is left: what the next round, and what the comparison may take
PATIENCE = 4.0  # times what a round is expected to take: a slow machine is no endpoint that forgets a request
OVERFULL = 1.3  # of the cache, so that it is short for sure
FULL, LONGER = 0.9, 3.0  # of the cache: so full nothing more is admitted, and answers must outgrow what is left
LEFT_TOKENS = 1024  # of an answer whose client leaves
SPARE_TOKENS = 64  # of a context: what a chat template may put around a prompt


async def interference(asker: Asker) -> None:
    """Prompts with a canary each: alone, alone again, all at once, at once with long prompts; then clients leave."""
    d, wish = asker.dialect, asker.wish
    bodies = [_with_canary(asker, i) for i in range(wish.together)]
    await asker.count("before_alone")
    for again in ("alone", "again"):
        for i, body in enumerate(bodies):
            await asker(f"{again}/{i}", body)
    await asker.count("before_together")
    await asker.at_once({f"together/0/{i}": body for i, body in enumerate(bodies)}, peak="peak_together")
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    await asker.at_once(
        {f"together/1/{i}": body | streamed for i, body in enumerate(bodies)},
        injected={f"long/{j}": _long(asker, j) for j in range(2)},
        peak="peak_injected",
    )
    if d.logprobs:
        await asker.at_once({f"together/2/{i}": _other_options(body, d, i) for i, body in enumerate(bodies)})
    await asker.count("after_together")
    if wish.together >= FEWEST_FOR_SURGE:
        await _prefix(asker)
        await _surge(asker)
    await _cancel(asker, bodies)


def _with_canary(asker: Asker, number: int) -> dict[str, Any]:
    seed = asker.wish.seed
    prompt = f"{unique(30 + number, seed=seed, words=asker.wish.words)} The password is {canary(number, seed=seed)}."
    return asks.ask(asker.dialect, prompt, max_tokens=asker.wish.tokens, **_with_ids(asker))


def _with_ids(asker: Asker) -> dict[str, Any]:
    """What makes an endpoint that was seen to name token ids do so: then a reference can follow what is in doubt."""
    named = any(e.label == "return_token_ids" and e.answer.token_ids for e in asker.exchanges)
    return {"return_token_ids": True} if asker.wish.followed and named else {}


def _long(asker: Asker, number: int) -> dict[str, Any]:
    words = min(8 * asker.wish.words, words_that_fit(asker, 4))
    return asks.ask(asker.dialect, unique(40 + number, seed=asker.wish.seed, words=words), max_tokens=4)


def _other_options(body: dict[str, Any], dialect: Dialect, number: int) -> dict[str, Any]:
    """The same request with other wishes about log-probabilities than its neighbours have: none, more, the same."""
    field = "top_logprobs" if dialect.api == "chat" else "logprobs"
    if number % 3 == 1:
        return {k: v for k, v in body.items() if k not in ("logprobs", "top_logprobs")}
    return body | {field: 5} if number % 3 == 2 else body


def words_that_fit(asker: Asker, tokens: int) -> int:
    """Words of a prompt that leaves room for `tokens` of an answer in the context that the endpoint names."""
    if asker.context is None:
        return 1 << 20
    return max(1, int((asker.context - tokens - SPARE_TOKENS) / asker.tokens_per_word))


async def _prefix(asker: Asker) -> None:
    """A long prompt cold, and warm: the second time its prefix may lie in a cache."""
    words = min(PREFIX_WORDS, words_that_fit(asker, asker.wish.tokens))
    for i in range(2):
        prompt = unique(50 + i, seed=asker.wish.seed, words=words)
        body = asks.ask(asker.dialect, prompt, max_tokens=asker.wish.tokens)
        await asker.count(f"before_warm/{i}")
        for warmth in ("cold", "warm"):
            await asker(f"prefix/{warmth}/{i}", body)
            if warmth == "cold":
                await asker.count(f"between_warm/{i}")
        await asker.count(f"after_warm/{i}")


# ----------------------------------------------------------------------------------------------- memory runs short


@dataclass(frozen=True)
class Size:
    """Of one surge: requests at once, words of each prompt, tokens of each answer."""

    count: int
    words: int
    tokens: int


async def _surge(asker: Asker) -> None:
    """Many long prompts with long answers at once, until memory runs short by the endpoint's own counters, or it is
    clear that so few requests cannot fill it in the time that is left; then the same prompts alone. Whose memory is
    taken is often the last to come, so what is compared is spread over all of them."""
    size = _fitting(asker, Size(2 * asker.wish.together, SURGE_WORDS, 2 * asker.wish.tokens))
    before = (await asker.count("before_surge")).values
    expected_s = size.count * _seconds_alone(asker)
    for again in range(SURGE_ROUNDS):
        bodies = _surge_bodies(asker, again, size)
        begin, patience_s = _now(), min(PATIENCE * expected_s, asker.client.seconds_left / 2)
        jobs = {f"surge/together/{again}.{i}": body for i, body in enumerate(bodies)}
        await asker.at_once(jobs, peak=f"peak_surge/{again}", patience_s=patience_s)
        seconds = _now() - begin
        after, peak = await asker.count("after_surge"), asker.peak(f"peak_surge/{again}")
        more = grown(size, peak, seconds=seconds, room_s=SURGE_SHARE * asker.client.seconds_left)
        if more is None or after.values.get("preemptions", 0.0) > before.get("preemptions", 0.0):
            break
        more = _fitting(asker, more)
        if more == size:
            break  # the context lets no request be longer
        expected_s, size = seconds * larger(size, more), more
    await _surge_controls(asker, {f"{again}.{i}": bodies[i] for i in spread(len(bodies), MOST_COMPARED)})


def _now() -> float:
    return asyncio.get_running_loop().time()


def _seconds_alone(asker: Asker) -> float:
    """What a long prompt took with nothing beside it."""
    taken = (e.reply.end_ns - e.reply.sent_ns for e in asker.exchanges if e.label.startswith("prefix/cold/"))
    return max(taken, default=0) / 1e9


async def _surge_controls(asker: Asker, bodies: dict[str, dict[str, Any]]) -> None:
    """The prompts of a surge alone, and beside one other each, when memory is not short: what one neighbour does.
    The last to come are asked first, since a slow endpoint has no time for all."""
    keys = list(bodies)[::-1]
    end = _now() + SURGE_SHARE * asker.client.seconds_left
    for begin in range(0, len(keys), 2):
        pair = keys[begin : begin + 2]
        if begin >= FEWEST_COMPARED and _now() > end:
            break
        for key in pair:
            await asker(f"surge/alone/{key}", bodies[key])
        if len(pair) == 2:
            await asker.at_once({f"surge/beside/{key}": bodies[key] for key in pair})


def _surge_bodies(asker: Asker, again: int, size: Size) -> list[dict[str, Any]]:
    seed = asker.wish.seed
    prompts = (unique(60 + 1000 * again + i, seed=seed, words=size.words) for i in range(size.count))
    ids = _with_ids(asker)
    return [asks.ask(asker.dialect, prompt, max_tokens=size.tokens, **ids) for prompt in prompts]


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, in equal steps, the first and the last among them."""
    most = min(most, count)
    return [round(i * (count - 1) / max(1, most - 1)) for i in range(most)]


def _fitting(asker: Asker, size: Size) -> Size:
    tokens = size.tokens
    if asker.context is not None:
        tokens = max(1, min(tokens, asker.context // 3))
    return Size(size.count, min(size.words, words_that_fit(asker, tokens)), tokens)


def grown(size: Size, peak: dict[str, float], *, seconds: float, room_s: float) -> Size | None:
    """The surge that would fill the cache, from how full this one of `seconds` made it; None when it cannot be told,
    would be too large, or would take more than `room_s`. Where requests had to wait for a place, more of them fill
    nothing: they must be longer. Where it was full and nobody gave way, prompts had been admitted until the rest was
    too small for one more, and their answers fitted into it: longer answers do not."""
    usage = peak.get("kv_usage")
    if not usage or "preemptions" not in peak:
        return None
    if usage >= FULL:
        return Size(size.count, size.words, round(size.tokens * LONGER)) if LONGER * seconds <= room_s else None
    growth = OVERFULL / usage
    if growth > MOST_GROWTH or growth * seconds > room_s:
        return None
    more = 1.0 if peak.get("waiting") else min(growth, MOST_AT_ONCE / size.count)
    longer = max(1.0, growth / more)
    return Size(round(size.count * more), round(size.words * longer), round(size.tokens * longer))


def larger(size: Size, more: Size) -> float:
    """How many times the work of `size` is in `more`."""
    return more.count * (more.words + more.tokens) / (size.count * (size.words + size.tokens))


# ------------------------------------------------------------------------------------------------ clients that leave


async def _cancel(asker: Asker, bodies: list[dict[str, Any]]) -> None:
    """Clients that leave inside a long answer, together, twice; then the same prompts must be answered as before.

    Twice, since what an endpoint keeps on purpose (prefixes of prompts) it keeps once, and a leak grows. Long, since
    an endpoint that goes on after its client has left is known by the time for which it is not there for others. One
    prompt calls for characters of several bytes: while one is not whole nothing is sent, and some look only then."""
    usage: float | None = None
    plain = Dialect(asker.dialect.api, asker.dialect.model)  # with log-probabilities each token is sent at once
    leaving = [*bodies[:3], asks.ask(plain, MULTIBYTE[0], max_tokens=asker.wish.tokens)]
    tokens = max(2 * asker.wish.tokens, LEFT_TOKENS if asker.context is None else min(LEFT_TOKENS, asker.context // 3))
    await asker.count("before_cancel")
    for again in range(2):
        left = await _leave(asker, again, leaving, tokens)
        if all(e.refused for e in left):  # a context that has no room for so long an answer, and does not say so
            left = await _leave(asker, again, leaving, tokens := 2 * asker.wish.tokens)
        asker.exchanges += left
        counters = await settled(asker, f"after_cancel/{again}", usage)
        usage = counters.values.get("kv_usage")
    asker.exchanges += await _leave(asker, 2, leaving[-1:], tokens)  # alone: a neighbour may end what nobody reads
    prompts = enumerate(bodies[:2])
    after = [await asker(f"after_cancel/{i}", body, limit_s=_usual_s(asker, i)) for i, body in prompts]
    if all(e.reply.fault in FAULTY for e in after):
        raise GivenUp(f"no request is answered since clients left ({after[0].reply.fault})")


def _usual_s(asker: Asker, number: int) -> float:
    """Seconds in which a prompt should be answered again: who is busy with clients that left takes longer."""
    alone = next((e for e in asker.exchanges if e.label == f"alone/{number}"), None)
    took_s = (alone.reply.end_ns - alone.reply.sent_ns) / 1e9 if alone is not None else 0.0
    return max(asker.client.limits.stall_s, PATIENCE * took_s)


async def _leave(asker: Asker, again: int, bodies: list[dict[str, Any]], tokens: int) -> list[Exchange]:
    """Asks for `tokens` of each answer, streamed, and closes each connection after a few chunks."""
    more = {"stream": True, "max_tokens": tokens}
    jobs = {f"cancel/{again}{j}": body | more for j, body in enumerate(bodies)}
    asked = (asker.client.ask(label, asker.dialect.path, body, cut_after=3) for label, body in jobs.items())
    return list(await asyncio.gather(*asked))
