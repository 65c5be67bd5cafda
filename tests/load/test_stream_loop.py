"""The loop that reads streams on its way, and transports in its place: what comes, what is sent, whose turn it is."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time

import pytest
from mock_endpoint import Endpoint, serving

from day0check.load import stream_loop
from day0check.load.answers import read_answer
from day0check.load.client import Client, Limits, target_of
from day0check.load.records import Reply
from day0check.load.stream_loop import StreamLoop, run_streams

PATH = "/v1/chat/completions"
BOTH = pytest.mark.parametrize("streams", [True, False], ids=["loop", "transport"])


@pytest.fixture(autouse=True)
def _which(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "streams" in request.fixturenames and not request.getfixturevalue("streams"):
        monkeypatch.setattr(stream_loop, "AVAILABLE", False)
    elif not stream_loop.AVAILABLE:
        pytest.skip("this system has no epoll")


def body(**fields) -> dict:  # type: ignore[no-untyped-def]
    messages = [{"role": "user", "content": "x"}]
    return {"model": "mock", "messages": messages, "max_tokens": 30, "temperature": 0, "stream": True} | fields


async def asked(url: str, body: dict, count: int = 1) -> list[Reply]:
    async with Client(target_of(url), Limits(stall_s=10, request_s=20)) as client:
        first = await asyncio.gather(*(client.post_in_load(PATH, body) for _ in range(count)))
        return [*first, await client.post_in_load(PATH, body)]  # on a connection that was used before


@BOTH
def test_streams_side_by_side_are_whole(streams: bool) -> None:
    """Would catch a read that lands in another connection's answer: all connections share a buffer."""
    endpoint = Endpoint(delay_s=0.001)
    with serving(endpoint) as url:
        replies = run_streams(asked(url, body(), 12))
    answers = [read_answer(reply) for reply in replies]
    assert {(r.status, r.fault) for r in replies} == {(200, "")}
    assert len({a.text for a in answers}) == 1
    assert all(len(a.pieces) == 30 and not a.flaws for a in answers)
    times = [piece.at_ns for piece in answers[0].pieces]
    assert times == sorted(times)
    assert times[-1] - times[0] > 20e6  # thirty chunks a millisecond apart, each with a time of its own


@BOTH
def test_a_request_larger_than_the_socket_takes_at_once(streams: bool) -> None:
    """Would catch a long prompt of which only the first part is sent."""
    large = [{"role": "user", "content": "y" * (12 << 20)}]
    with serving(Endpoint()) as url:
        replies = run_streams(asked(url, body(messages=large, max_tokens=2)))
    assert [(r.status, r.fault) for r in replies] == [(200, "")] * 2


@BOTH
@pytest.mark.parametrize(("flag", "fault"), [("drop", "dropped"), ("stall", "stalled")])
def test_a_connection_that_breaks_or_falls_silent_is_told(streams: bool, flag: str, fault: str) -> None:
    """Would catch a broken connection that is waited for until the limit, and a watch that never has its turn."""

    async def run(url: str) -> Reply:
        async with Client(target_of(url), Limits(stall_s=0.4, request_s=20)) as client:
            return await client.post_in_load(PATH, body())

    with serving(Endpoint(flag)) as url:
        assert run_streams(run(url)).fault == fault


@BOTH
@pytest.mark.parametrize(("flag", "request_s", "fault"), [("late_first", 20.0, ""), ("mute", 1.0, "silent")])
def test_silence_before_the_first_byte_is_no_stall(streams: bool, flag: str, request_s: float, fault: str) -> None:
    """Would catch a long prefill that is told to stop in the middle of its answer, and a server that never begins."""

    async def run(url: str) -> Reply:
        async with Client(target_of(url), Limits(stall_s=0.4, request_s=request_s)) as client:
            return await client.post_in_load(PATH, body())

    with serving(Endpoint(flag)) as url:
        assert run_streams(run(url)).fault == fault


def test_nobody_there_is_refused() -> None:
    """Would catch a failed connection that ends the whole load."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert {r.fault for r in run_streams(asked(f"http://127.0.0.1:{port}", body()))} == {"refused"}


def test_many_reads_leave_others_their_turn() -> None:
    """Would catch a reader that keeps the loop while bytes come: nothing would be sent on time."""
    here, there = socket.socketpair()
    here.setblocking(False)
    until = time.monotonic() + 0.6

    def flood() -> None:
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                there.send(b"HTTP/1.1 200 OK\r\n")
            time.sleep(0.0002)

    async def run() -> tuple[float, int]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, StreamLoop)
        connection = loop.streams.take(here)
        connection.ask(b"x", loop.create_future())
        begin = time.monotonic()
        await asyncio.sleep(0.05)
        late_s = time.monotonic() - begin - 0.05
        connection.close()
        return late_s, len(connection.reads)

    with there:
        sender = threading.Thread(target=flood)
        sender.start()
        late_s, reads = run_streams(run())
        until = 0.0
        sender.join()
    assert reads > 10
    assert late_s < 0.3


def test_what_the_work_gives_is_not_written_out() -> None:
    """Would catch a load whose every read is turned into text when it is over, which costs more than to read it."""

    written: list[str] = []

    class Large:
        def __repr__(self) -> str:
            written.append("every read")
            return ""

    async def work() -> Large:
        await asyncio.sleep(0)
        return Large()

    given = run_streams(work())
    assert type(given) is Large
    assert written == []
