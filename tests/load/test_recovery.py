"""How long an endpoint that says it is not ready is waited for, and how often it is asked."""

from __future__ import annotations

import asyncio
import time
from email.utils import formatdate

import pytest
from aiohttp import web
from mock_endpoint import Endpoint, serving
from test_client import raw_server

from day0check.load.asks import COMPLETIONS, Dialect, ask
from day0check.load.client import Client, Limits, retry_after, target_of
from day0check.load.records import Reply
from day0check.load.scenario import Asker, Wish, health_within, until_started

DATE = "Fri, 31 Dec 1999 23:59:59 GMT"
AT_DATE = 946684799.0


@pytest.mark.parametrize(
    ("value", "now", "seconds"),
    [
        ("3", 0, 3.0),
        (" 0 ", 0, 0.0),
        (DATE, AT_DATE - 5, 5.0),
        (DATE, AT_DATE + 5, 0.0),
        ("", 0, None),
        ("soon", 0, None),
        ("-1", 0, None),
        ("1.5", 0, None),
        ("Fri, 99 Dec 1999 23:59:59 GMT", 0, None),
    ],
)
def test_both_forms_of_retry_after(value: str, now: float, seconds: float | None) -> None:
    """Would catch a date that is read as none, a moment that has passed as a negative pause, and words that raise."""
    assert retry_after(value, now) == seconds


class Recovering:
    """Answers 503 `times` times, each with the same Retry-After, and then 200; its clock is that of its pauses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int, retry_after_s: float | None) -> None:
        self.times, self.retry_after_s, self.now, self.pauses = times, retry_after_s, 0.0, []
        monkeypatch.setattr("day0check.load.scenario.time.monotonic", lambda: self.now)
        monkeypatch.setattr("day0check.load.scenario.asyncio.sleep", self.sleep)

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    async def get(self, path: str) -> Reply:
        self.times -= 1
        return Reply(503 if self.times >= 0 else 200, 0, 0, 0, retry_after_s=self.retry_after_s)


@pytest.mark.parametrize(
    ("times", "after", "seconds", "pauses", "well"),
    [
        (0, None, 20.0, [], True),
        (7, None, 20.0, [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0], True),
        (2, 3.0, 20.0, [3.0, 3.0], True),
        (3, 0.0, 20.0, [0.1, 0.1, 0.1], True),
        (9, 3600.0, 20.0, [20.0], False),
        (99, None, 4.0, [0.1, 0.2, 0.4, 0.8, 1.6, 0.9], False),
    ],
)
def test_an_endpoint_is_asked_again_when_it_says_or_more_and_more_rarely(  # type: ignore[no-untyped-def]
    monkeypatch, times, after, seconds, pauses, well
) -> None:
    """Would catch Retry-After that nobody reads, a server that is asked without a pause, one that is waited for longer
    than is allowed, and a last look that is never taken."""
    endpoint = Recovering(monkeypatch, times, after)
    found = asyncio.run(health_within(endpoint, seconds))
    assert endpoint.pauses == pytest.approx(pauses)
    assert (found is not None and found.status == 200) is well


def test_the_client_reads_the_header() -> None:
    """Would catch a header that is lost between the wire and the one who waits."""
    with raw_server(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n") as url:

        async def go() -> Reply:
            async with Client(target_of(url), Limits()) as client:
                return await client.get("/health")

        assert asyncio.run(go()).retry_after_s == 7.0


class ComesBack(Endpoint):
    """Refuses the second question; /health then says once when to look again, and says yes after that."""

    def __init__(self, *, as_date: bool) -> None:
        super().__init__()
        self.as_date, self.asked, self.looks = as_date, 0, []

    async def health(self, _: web.Request) -> web.Response:
        self.looks.append(time.time())
        if self.asked != 2 or len(self.looks) > 2:  # the first look is that of the start
            return web.Response()
        again = formatdate(time.time() + 2, usegmt=True) if self.as_date else "1"  # a date has whole seconds
        return web.Response(status=503, headers={"Retry-After": again})

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        return web.Response(status=503) if self.asked == 2 else await super().answer(request)


@pytest.mark.parametrize("as_date", [False, True])
def test_an_endpoint_that_names_its_time_is_not_asked_before(as_date: bool) -> None:
    """Would catch a run that asks on, or looks again, before the time that the endpoint names on the wire."""
    endpoint = ComesBack(as_date=as_date)

    async def go(url: str) -> tuple[int, int, float]:
        async with Client(target_of(url), Limits()) as client:
            asker = Asker(client, Wish())
            await until_started(asker)
            body = ask(Dialect("completions", "mock"), "Hello", max_tokens=2)
            first, second = [(await asker(f"question/{i}", body, path=COMPLETIONS)).reply.status for i in range(2)]
            return first, second, time.time()

    with serving(endpoint) as url:
        first, second, went_on = asyncio.run(go(url))
    assert (first, second) == (200, 503)
    assert len(endpoint.looks) == 3
    assert endpoint.looks[2] - endpoint.looks[1] >= 0.99
    assert went_on >= endpoint.looks[2]
