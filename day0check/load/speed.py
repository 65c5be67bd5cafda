"""The load phases: warm-up, closed loops over concurrency until the endpoint saturates, an open loop below that."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from day0check.load import asks
from day0check.load.answers import read_answer
from day0check.load.arrivals import constant, poisson
from day0check.load.client import Client
from day0check.load.metrics import Timing, summary, timing
from day0check.load.prompts import unique
from day0check.load.records import Reply
from day0check.load.trace import Due
from day0check.load.traffic import Load, OwnCost, Send, closed_loop, open_loop

WARMUP = "warmup"
SATURATED_GAIN = 1.05  # less throughput than this from twice the concurrency ends the sweep, and so does a clear no
OPEN_SHARE = 0.7  # of the best closed-loop rate, where the open loop runs when no rate is given
_FIRST_PROMPT = 1000


@dataclass(frozen=True)
class SpeedPlan:
    """`requests` per phase at least, and at least four per stream; `rate_per_s` None: a share of the best found."""

    concurrencies: tuple[int, ...] = (1, 2, 4, 8)
    requests: int = 16
    words: int = 32
    output_tokens: int = 32
    warmup: int = 4
    arrivals: Literal["constant", "poisson", "trace"] = "poisson"
    trace: tuple[Due, ...] = ()
    rate_per_s: float | None = None
    seed: int = 0
    ignore_eos: bool = False
    slos: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Phase:
    """One phase: its name, its figures, and every sample with the reply it came from."""

    name: str
    figures: dict[str, Any]
    samples: tuple[Timing, ...]
    load: Load


async def run_speed(
    client: Client, dialect: asks.Dialect, plan: SpeedPlan, *, ended: Callable[[Phase], None] = lambda _: None
) -> list[Phase]:
    """The phases in order; `ended` is told each as it ends, of a cancelled one what had come of it. Ends early when the
    endpoint saturates, fails every request, or the bounds are reached."""
    given = _Prompts(client, dialect, plan)
    run = _Phases(given, plan, ended)
    await run(WARMUP, closed_loop(given.send, count=plan.warmup, concurrency=2))
    best = 0.0
    for concurrency in plan.concurrencies:
        if _ended(run.phases[-1], client):
            return run.phases
        count = max(plan.requests, 4 * concurrency)
        phase = await run(f"closed/{concurrency}", closed_loop(given.send, count=count, concurrency=concurrency))
        rate = phase.figures["output_tokens_per_s"]
        if rate < best * SATURATED_GAIN or phase.figures["busy"]:
            phase.figures["saturated"] = True
            break
        best = max(best, rate)
    if _ended(run.phases[-1], client):
        return run.phases
    if plan.arrivals == "trace":
        given.follow(plan.trace, run.phases[0])
        due, extra = tuple(d.at_s for d in plan.trace), {}
    else:
        rate_per_s = plan.rate_per_s or OPEN_SHARE * max(p.figures["requests_per_s"] for p in run.phases)
        if rate_per_s <= 0:
            return run.phases
        made = poisson(rate_per_s, plan.requests, seed=plan.seed)
        due, extra = (
            made if plan.arrivals == "poisson" else constant(rate_per_s, plan.requests),
            {"rate_per_s": rate_per_s},
        )
    due = tuple(d for d in due if d < client.seconds_left - client.limits.stall_s) or due[:1]
    await run(f"open/{plan.arrivals}", open_loop(given.send, due), **extra)
    return run.phases


class _Phases:
    """Runs one phase after the other and tells `ended` of each, of a cancelled one by its finished requests."""

    def __init__(self, given: _Prompts, plan: SpeedPlan, ended: Callable[[Phase], None]) -> None:
        self.phases: list[Phase] = []
        self._given, self._plan, self._ended = given, plan, ended

    async def __call__(self, name: str, load: Awaitable[Load], **extra: Any) -> Phase:
        begin, self._given.came = time.perf_counter_ns(), []
        try:
            phase = _phase(name, await load, self._plan, **extra)
        except asyncio.CancelledError:
            end, nothing = time.perf_counter_ns(), OwnCost((), (), 0.0, 0.0)
            self._ended(_phase(name, Load(tuple(self._given.came), begin, end, nothing), self._plan, **extra))
            raise
        self.phases.append(phase)
        self._ended(phase)
        return phase


def _ended(phase: Phase, client: Client) -> bool:
    figures = phase.figures
    return (
        figures["failed"] == figures["requests"]
        or client.seconds_left <= 0
        or any(r.fault == "unsent" for r in phase.load.replies)
    )


class _Prompts:
    """Sends the next unique prompt; a request that the bounds left out is none."""

    def __init__(self, client: Client, dialect: asks.Dialect, plan: SpeedPlan) -> None:
        self.client, self.plan = client, plan
        self.dialect = asks.Dialect(dialect.api, dialect.model)  # log-probabilities are work of their own
        self.came: list[Reply] = []  # of the phase that runs
        self._next = _FIRST_PROMPT
        self._trace: tuple[Due, ...] = ()
        self._tokens_per_word = 1.0

    def follow(self, trace: tuple[Due, ...], warmup: Phase) -> None:
        """From now on lengths are those of the trace; what a word is in tokens is learnt from the warm-up."""
        self._trace = trace
        counts = [s.prompt_tokens for s in warmup.samples if s.ok and s.prompt_tokens]
        if counts:
            self._tokens_per_word = max(0.25, sum(counts) / len(counts) / self.plan.words)

    @property
    def send(self) -> Send:
        return self._send

    async def _send(self, number: int, due_ns: int | None) -> Reply:
        self._next += 1
        words, tokens = self.plan.words, self.plan.output_tokens
        if self._trace:
            due = self._trace[number]
            words = max(1, round(due.prompt_tokens / self._tokens_per_word)) if due.prompt_tokens else words
            tokens = due.output_tokens or tokens
        prompt = unique(self._next, seed=self.plan.seed, words=words)
        body = asks.ask(self.dialect, prompt, max_tokens=tokens, stream=True)
        if self.plan.ignore_eos:
            body["ignore_eos"] = True
        reply = await self.client.post_in_load(self.dialect.path, body, scheduled_ns=due_ns)
        self.came.append(reply)
        return reply


def _phase(name: str, load: Load, plan: SpeedPlan, **extra: Any) -> Phase:
    samples = tuple(timing(reply, read_answer(reply)) for reply in load.replies if reply.fault != "unsent")
    return Phase(name, summary(samples, load, slos=plan.slos) | extra, samples, load)
