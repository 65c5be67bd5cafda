"""The client against servers that misbehave: every fault has a name, nothing raises, nothing takes for ever."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from mock_endpoint import Endpoint, serving

from day0check.errors import UsageError
from day0check.load.asks import CHAT, Dialect, ask
from day0check.load.client import Client, Limits, target_of
from day0check.load.counters import parse
from day0check.load.records import Exchange

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
QUICK = Limits(stall_s=0.4, request_s=1.5, seconds=10, connect_s=1)
BODY = ask(Dialect("chat", "mock"), "hello there", max_tokens=8, stream=True)


def asked(url: str, body=BODY, *, limits: Limits = QUICK, **more: float) -> Exchange:  # type: ignore[no-untyped-def]
    async def go() -> Exchange:
        async with Client(target_of(url), limits) as client:
            return await client.ask("x", CHAT, body, **more)

    return asyncio.run(go())


@contextmanager
def raw_server(answer: bytes, *, after_s: float = 0.0) -> Iterator[str]:
    """Sends `answer` to whoever connects, `after_s` after the request, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(65536)
                    time.sleep(after_s)
                    peer.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


@pytest.mark.parametrize(
    ("flag", "fault"), [("stall", "stalled"), ("mute", "silent"), ("drop", "dropped"), ("late", "late")]
)
def test_faults_have_names_and_end_in_time(flag: str, fault: str) -> None:
    """Would catch a client that hangs with its server, and a half answer that passes for one."""
    begin = time.monotonic()
    with serving(Endpoint(flag)) as url:
        exchange = asked(url)
    assert (exchange.reply.fault, exchange.good) == (fault, False)
    assert time.monotonic() - begin < 6


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc"])
def test_what_is_no_http_is_a_fault(answer: bytes) -> None:
    """Would catch an exception of the HTTP library that reaches the user."""
    with raw_server(answer) as url:
        assert asked(url).reply.fault in ("garbage", "dropped")


@pytest.mark.parametrize(("patience_s", "fault"), [(0.0, "silent"), (5.0, "")])
def test_patience_outlasts_the_limits(patience_s: float, fault: str) -> None:
    """Would catch a request among many that is given up because the machine is slow."""
    with raw_server(WHOLE, after_s=1.8) as url:
        assert asked(url, patience_s=patience_s).reply.fault == fault


def test_who_works_before_a_whole_answer_is_not_stalled() -> None:
    """Would catch a slow server that is told to stop in the middle, while it has not begun to send."""
    with raw_server(WHOLE, after_s=3 * QUICK.stall_s) as url:
        assert asked(url).reply.fault == ""


def test_nobody_there_is_refused() -> None:
    """Would catch an unreachable address that looks like a slow one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert asked(f"http://127.0.0.1:{port}").reply.fault == "refused"


def test_a_redirect_is_not_followed() -> None:
    """Would catch traffic to an address that nobody gave."""
    with (
        serving(Endpoint()) as other,
        raw_server(f"HTTP/1.1 302 Found\r\nLocation: {other}{CHAT}\r\nContent-Length: 0\r\n\r\n".encode()) as url,
    ):
        assert asked(url).reply.status == 302


def test_bounds_hold() -> None:
    """Would catch a run that sends more, reads more or lasts longer than it said."""

    async def go(url: str, limits: Limits) -> list[str]:
        async with Client(target_of(url), limits) as client:
            return [(await client.ask("x", CHAT, BODY)).reply.fault for _ in range(3)]

    with serving(Endpoint()) as url:
        assert asyncio.run(go(url, Limits(requests=2))) == ["", "", "unsent"]
        assert asyncio.run(go(url, Limits(seconds=0))) == ["unsent"] * 3
        assert asyncio.run(go(url, Limits(body_bytes=100))) == ["flood"] * 3


def test_leaving_inside_a_stream() -> None:
    """Would catch a cancelled request that reads to its end, so that nothing is cancelled."""
    endpoint = Endpoint(delay_s=0.01)
    with serving(endpoint) as url:
        exchange = asked(url, BODY | {"max_tokens": 60}, cut_after=3)
        end = time.monotonic() + 3
        while not endpoint.left and time.monotonic() < end:
            time.sleep(0.01)
    assert exchange.reply.fault == "cut"
    assert endpoint.left == 1


def test_every_read_has_its_time() -> None:
    """Would catch times that are taken when a stream is decoded and not when it came."""
    with serving(Endpoint(delay_s=0.02)) as url:
        exchange = asked(url)
    at = [p.at_ns for p in exchange.answer.pieces]
    assert len(at) == 8
    assert (at[-1] - at[0]) / 1e6 >= 7 * 20 * 0.8
    assert exchange.reply.sent_ns < at[0] < exchange.reply.end_ns


BAD_URLS = [
    "",
    "127.0.0.1:8000",
    "ftp://x",
    "http://",
    "http://x?y=1",
    "http://user:pw@x",
    "http://x:99999",
    "http://[::1",
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_addresses_that_are_none(url: str) -> None:
    """Would catch a bad address that is told only by a failed connection."""
    with pytest.raises(UsageError, match="no http address"):
        target_of(url)


def test_addresses_as_users_write_them() -> None:
    """Would catch requests to /v1/v1/models."""
    assert {target_of(u).base for u in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/")} == {
        "http://h:1"
    }
    assert target_of("https://h/openai/v1").base == "https://h/openai"


def test_counters_from_prometheus_text() -> None:
    """Would catch labels that hide a series, and several series of which one counts."""
    name = "vllm:num_requests_running"
    text = f'# HELP x\n{name}{{engine="0"}} 1.0\n{name}{{engine="1"}} 2\nother 5\nbad{{ 1\n'
    assert parse(text + "vllm:num_requests_waiting NaN?\n") == {"running": 3.0}


def test_a_connection_closed_while_idle_drops_no_request() -> None:
    """Would catch a server blamed for closing a connection after its answer, which it may do without saying so."""
    accepted: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                accepted.append(1)
                with peer:
                    peer.recv(65536)
                    peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                    peer.recv(65536)  # the second request on this connection is read and never answered

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()

        async def go() -> list[Exchange]:
            async with Client(target_of(f"http://127.0.0.1:{listener.getsockname()[1]}"), QUICK) as client:
                return [await client.ask("x", CHAT, BODY) for _ in range(2)]

        replies = [e.reply for e in asyncio.run(go())]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)
    assert [(r.status, r.fault) for r in replies] == [(200, ""), (200, "")]
    assert len(accepted) == 2
