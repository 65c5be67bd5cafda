"""Many requests of every shape, a third of them given up at a random moment; what is kept of them are counts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from day0check.load import asks
from day0check.load.prompts import unique
from day0check.load.records import Exchange
from day0check.load.scenario import Asker, GivenUp, settled

AT_ONCE = 16
LEAVES = 0.35  # share of the clients that leave
GOLDEN = 2
LONGEST_WORDS, LONGEST_ANSWER = 64, 32
SOONEST_S, LATEST_S = 0.002, 0.5  # when a client leaves that does not wait for a chunk
MOST_KEPT = 8  # exchanges that failed
ROUNDS = 2


@dataclass
class Soaked:
    """What became of the requests: `counts` by outcome ("answered", "left", "busy", a fault, "HTTP 500")."""

    counts: Counter[str] = field(default_factory=Counter)
    failed: list[Exchange] = field(default_factory=list)


async def soak(asker: Asker, count: int, seen: Soaked) -> None:
    """`count` requests in two rounds, with golden prompts before and after each; told to `seen` as they end."""
    await settled(asker, "soak/before", None)
    await _golden(asker, "before")
    kept = 0
    for again in range(ROUNDS):
        begin, end = count * again // ROUNDS, count * (again + 1) // ROUNDS
        await _storm(asker, seen, range(begin, end))
        counters = await settled(asker, f"soak/after/{again}", None)
        if not counters.values:
            await asyncio.sleep(1.0)  # it has no counters that could say when it is idle
        asker.exchanges += seen.failed[kept:]
        kept = len(seen.failed)
        await _golden(asker, f"after/{again}")


async def _golden(asker: Asker, when: str) -> None:
    for i in range(GOLDEN):
        prompt = unique(70 + i, seed=asker.wish.seed, words=asker.wish.words)
        await asker(f"soak/{when}/{i}", asks.ask(asker.dialect, prompt, max_tokens=asker.wish.tokens))


async def _storm(asker: Asker, seen: Soaked, numbers: range) -> None:
    left = iter(numbers)

    async def worker() -> None:
        for number in left:
            outcome = await _one(asker, seen, number)
            seen.counts[outcome] += 1
            if outcome == "unsent":
                raise GivenUp("the bounds of this run were reached")

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(_until_given_up(asker, worker))
    if seen.counts["unsent"]:
        raise GivenUp("the bounds of this run were reached")


async def _until_given_up(asker: Asker, worker: Any) -> None:
    try:
        await worker()
    except GivenUp:
        return


async def _one(asker: Asker, seen: Soaked, number: int) -> str:
    """One request of a random shape; its outcome in a word."""
    draw = random.Random(f"{asker.wish.seed}/{number}")
    dialect = asks.Dialect(asker.dialect.api, asker.dialect.model, asker.dialect.logprobs and draw.random() < 0.3)
    prompt = unique(100_000 + number, seed=asker.wish.seed, words=draw.randint(1, LONGEST_WORDS))
    stream, leaves = draw.random() < 0.6, draw.random() < LEAVES
    body = asks.ask(dialect, prompt, max_tokens=draw.randint(1, LONGEST_ANSWER), stream=stream)
    body |= {"temperature": draw.choice((0, 1.0)), "seed": number}
    cut = draw.randint(1, 6) if leaves and stream and draw.random() < 0.5 else None
    asking = asker.client.ask(f"soak/request/{number}", dialect.path, body, cut_after=cut)
    if leaves and cut is None:
        try:
            async with asyncio.timeout(SOONEST_S + draw.random() * (LATEST_S - SOONEST_S)):
                exchange = await asking
        except TimeoutError:
            return "left"
    else:
        exchange = await asking
    return _outcome(exchange, seen)


def _outcome(exchange: Exchange, seen: Soaked) -> str:
    reply = exchange.reply
    if reply.fault == "cut":
        return "left"
    if reply.fault:
        outcome = reply.fault
    elif reply.status in (429, 503):
        return "busy"
    elif reply.status != 200:
        outcome = f"HTTP {reply.status}"
    elif exchange.answer.error:
        outcome = "error after 200"
    else:
        return "answered"
    if outcome != "unsent" and len(seen.failed) < MOST_KEPT:
        seen.failed.append(exchange)
    return outcome
