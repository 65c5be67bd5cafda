"""Arrivals and loops."""

from __future__ import annotations

import asyncio
import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from day0check.load.arrivals import constant, poisson
from day0check.load.metrics import timing
from day0check.load.prompts import canary, unique
from day0check.load.records import Answer, Piece, Reply
from day0check.load.traffic import closed_loop, open_loop


@settings(max_examples=40, deadline=None)
@given(st.floats(0.1, 1000), st.integers(1, 50), st.integers(0, 9))
def test_arrivals(rate: float, count: int, seed: int) -> None:
    """Would catch arrivals out of order, a rate that is not kept, and a seed that means nothing."""
    assert constant(rate, count) == tuple(i / rate for i in range(count))
    due = poisson(rate, count, seed=seed)
    assert len(due) == count
    assert due[0] == 0
    assert list(due) == sorted(due)
    assert due == poisson(rate, count, seed=seed)


def test_a_poisson_process_has_its_rate_and_spread() -> None:
    """Would catch gaps that are all alike or of another mean."""
    due = poisson(10.0, 4000, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(due)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, rel=0.06)
    assert sum((g - mean) ** 2 for g in gaps) / len(gaps) == pytest.approx(0.01, rel=0.15)


def test_rates_above_zero_only() -> None:
    """Would catch a division by zero deep in a run."""
    for make in (lambda: constant(0, 3), lambda: poisson(-1, 3, seed=0)):
        with pytest.raises(ValueError, match="above zero"):
            make()


def test_prompts_begin_alike_for_no_two() -> None:
    """Would catch prompts that share a prefix, which a prefix cache would answer too fast."""
    heads = {unique(i, seed=s, words=20)[:8] for i in range(200) for s in range(2)}
    assert len(heads) == 400
    assert unique(3, seed=1, words=20) == unique(3, seed=1, words=20)
    assert len({canary(i, seed=0) for i in range(100)}) == 100


async def slow(number: int, due_ns: int | None) -> Reply:
    """Answers one request at a time, 20 ms each."""
    sent = time.perf_counter_ns()
    async with LOCK[0]:
        await asyncio.sleep(0.02)
    end = time.perf_counter_ns()
    return Reply(200, sent if due_ns is None else due_ns, sent, end, streamed=True)


LOCK: list[asyncio.Lock] = []


def test_an_open_loop_does_not_wait_and_counts_from_when_it_was_due() -> None:
    """Would catch coordinated omission: a slow server that slows the load down and so looks fast."""

    async def run():  # type: ignore[no-untyped-def]
        LOCK[:] = [asyncio.Lock()]
        return await open_loop(slow, [0.0, 0.001, 0.002, 0.003])

    load = asyncio.run(run())
    done = [timing(r, Answer("x", choices=1, pieces=(Piece(r.end_ns, "x"),), last_ns=r.end_ns)) for r in load.replies]
    assert [t.ttft_ms >= 20 * (i + 1) - 4 for i, t in enumerate(done)] == [True] * 4
    assert all(r.sent_ns >= r.scheduled_ns for r in load.replies)
    assert len(load.own.dispatch_lag_ms) == 4


def test_a_closed_loop_keeps_its_concurrency() -> None:
    """Would catch more requests in flight than asked for, and requests that are left out."""
    flying: list[int] = []
    most: list[int] = []

    async def send(number: int, due_ns: int | None) -> Reply:
        assert due_ns is None
        flying.append(number)
        most.append(len(flying))
        await asyncio.sleep(0.001)
        flying.remove(number)
        return Reply(200, 0, 0, number)

    load = asyncio.run(closed_loop(send, count=20, concurrency=3))
    assert [r.end_ns for r in load.replies] == list(range(20))
    assert max(most) == 3


def test_the_lag_of_a_blocked_loop_is_seen() -> None:
    """Would catch a lag that is measured by a clock which stands still with the loop."""

    async def send(number: int, due_ns: int | None) -> Reply:
        await asyncio.sleep(0.03)
        time.sleep(0.05)  # the client does something slow of its own
        await asyncio.sleep(0.03)
        return Reply(200, 0, 0, 1)

    load = asyncio.run(closed_loop(send, count=1, concurrency=1))
    assert max(load.own.loop_lag_ms) >= 25
