"""The sweep of closed loops: it goes on while more at once give more, and a clear no to more is its end, no failure."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from mock_endpoint import Endpoint, serving

from day0check.checks.endpoint import speed as speed_check
from day0check.load.client import Limits, target_of
from day0check.load.observe import observe
from day0check.load.observed import Observed
from day0check.load.scenario import Wish
from day0check.load.speed import SpeedPlan

PLAN = SpeedPlan(concurrencies=(1, 2, 4, 8, 16), requests=4, warmup=2, words=6, output_tokens=8, rate_per_s=20.0)


class Narrow(Endpoint):
    """Answers `places` at once; further ones wait, or are told to come back when `refuses`."""

    places, refuses = 2, False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.running >= self.places and self.refuses:
            return web.json_response({"error": {"message": "busy"}}, status=429, headers={"Retry-After": "1"})
        while self.running >= self.places:
            await asyncio.sleep(0.001)
        return await super().answer(request)


class Closing(Narrow):
    refuses = True


def swept(kind: type[Endpoint], plan: SpeedPlan = PLAN) -> Observed:
    with serving(kind(delay_s=0.004)) as url:
        limits = Limits(stall_s=10, request_s=20)
        return observe(target_of(url), Wish(parts=("speed",)), limits=limits, speed=plan).observed


def closed(observed: Observed) -> list[str]:
    return [name for name in observed.speed if name.startswith("closed/")]


def test_the_sweep_ends_where_more_at_once_give_no_more() -> None:
    """Would catch a sweep that stops before it has found the limit, and one that goes on behind it."""
    observed = swept(Narrow)
    names = closed(observed)
    assert names[:2] == ["closed/1", "closed/2"]
    assert len(names) < len(PLAN.concurrencies)
    assert [bool(observed.speed[n].get("saturated")) for n in names] == [False] * (len(names) - 1) + [True]


def test_a_clear_no_to_more_ends_the_sweep_and_is_no_failure() -> None:
    """Would catch a queue with an end that is blamed for it, and refusals that are shown nowhere."""
    observed = swept(Closing)
    last = observed.speed[closed(observed)[-1]]
    assert closed(observed)[-1] == "closed/4"
    assert last["saturated"]
    assert last["failed"] == last["busy"] > 0
    assert not speed_check.judge(observed).findings


@pytest.mark.parametrize("phase", ["warmup", "closed/1", "open/poisson"])
def test_a_no_to_what_must_fit_is_a_failure(phase: str) -> None:
    """Would catch refusals of an endpoint that nobody overloads, which the end of the sweep may not excuse."""
    observed = swept(Endpoint, SpeedPlan(concurrencies=(1,), requests=4, warmup=2, words=6, rate_per_s=20.0))
    assert not speed_check.judge(observed).findings
    observed.speed[phase].update(failed=1, busy=1)
    (finding,) = speed_check.judge(observed).findings
    assert finding.evidence["pattern"] == "failed requests"
