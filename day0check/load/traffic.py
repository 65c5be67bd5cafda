"""Closed and open loops over one client, and what the client itself cost while they ran."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from day0check.load.records import Reply

_LAG_EVERY_S = 0.02

Send = Callable[[int, int | None], Awaitable[Reply]]  # (number of the request, when it was due) -> its reply


@dataclass(frozen=True)
class OwnCost:
    """What the client did to the measurement: lateness of its event loop and of its sends, CPU time over wall time."""

    loop_lag_ms: tuple[float, ...]
    dispatch_lag_ms: tuple[float, ...]
    cpu_share: float
    cpu_seconds: float


@dataclass(frozen=True)
class Load:
    """The replies of one phase in the order of their numbers, and the client's own cost in it."""

    replies: tuple[Reply, ...]
    begin_ns: int
    end_ns: int
    own: OwnCost


async def closed_loop(send: Send, *, count: int, concurrency: int) -> Load:
    """`count` requests, `concurrency` of them always in flight: each ending one is followed by the next."""
    numbers = iter(range(count))
    replies: dict[int, Reply] = {}

    async def worker() -> None:
        for number in numbers:
            replies[number] = await send(number, None)

    return await _measured(lambda: _all(worker() for _ in range(min(concurrency, count))), replies)


async def open_loop(send: Send, due_s: Sequence[float]) -> Load:
    """One request at each of `due_s`, whatever the earlier ones do; latency counts from when it was due."""
    replies: dict[int, Reply] = {}

    async def one(number: int, due_ns: int) -> None:
        replies[number] = await send(number, due_ns)

    async def run() -> None:
        begin = time.perf_counter_ns()
        async with asyncio.TaskGroup() as group:
            for number, due in enumerate(due_s):
                due_ns = begin + int(due * 1e9)
                wait = (due_ns - time.perf_counter_ns()) / 1e9
                if wait > 0:
                    await asyncio.sleep(wait)
                group.create_task(one(number, due_ns))

    return await _measured(run, replies)


async def _all(workers) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.TaskGroup() as group:
        for worker in workers:
            group.create_task(worker)


async def _measured(run: Callable[[], Awaitable[None]], replies: dict[int, Reply]) -> Load:
    lags: list[float] = []
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would stand still over every kept read while chunks come in
    watch = asyncio.create_task(_watch_loop(lags))
    cpu, begin = time.thread_time_ns(), time.perf_counter_ns()
    try:
        await run()
    finally:
        if collecting:
            gc.enable()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
    end = time.perf_counter_ns()
    cpu = time.thread_time_ns() - cpu
    ordered = tuple(replies[n] for n in sorted(replies))
    late = tuple((r.sent_ns - r.scheduled_ns) / 1e6 for r in ordered)
    return Load(ordered, begin, end, OwnCost(tuple(lags), late, cpu / max(end - begin, 1), cpu / 1e9))


async def _watch_loop(lags: list[float]) -> None:
    """Milliseconds by which a sleep ended late: time in which no chunk could have been stamped."""
    while True:
        begin = time.perf_counter_ns()
        await asyncio.sleep(_LAG_EVERY_S)
        lags.append((time.perf_counter_ns() - begin) / 1e6 - _LAG_EVERY_S * 1e3)
