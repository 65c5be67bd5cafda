"""The streaming client: sends to one address, keeps every read with its time, and never raises for what a server does.

Reading does no decoding: a stream's bytes are kept with their times and read when the load is over, so that the
client's own work stays small while it measures.
"""

from __future__ import annotations

import asyncio
import json
import math
import ssl
import time
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from day0check.errors import UsageError
from day0check.load.answers import read_answer
from day0check.load.records import Exchange, Fault, Reply
from day0check.load.stream_client import LATE, SILENT, STALLED, StreamClient

IDLE_CONNECTION_S = 1.0  # shorter than any server keeps one: what a server closes while idle is no dropped request
_END = b"[DONE]"
URL_TODO = "write it like http://127.0.0.1:8000"
LINGER_S = 0.2  # after [DONE] the connection may stay open this long


@dataclass(frozen=True)
class Limits:
    """Bounds of everything the client does: requests and seconds in all, then per request. `stall_s`: the longest
    silence inside an answer; before its first byte a server may be silent for `request_s`, as it works until then."""

    requests: int = 5000
    seconds: float = 600.0
    connect_s: float = 5.0
    stall_s: float = 20.0
    request_s: float = 60.0
    body_bytes: int = 32 << 20


@dataclass(frozen=True)
class Target:
    """Where the endpoint is: `base` without a trailing slash and without /v1."""

    base: str
    api_key: str | None = None


def target_of(url: str, api_key: str | None = None) -> Target:
    """The target of a URL as users write it. Raises UsageError for what is no http address."""
    try:
        parts = urlsplit(url.strip())
        whole = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:  # a port beyond 65535, half of an IPv6 address
        raise UsageError(f"{url!r} is no http address: {error}", where="--url", todo=URL_TODO) from error
    if not whole or parts.query or parts.fragment or parts.username:
        raise UsageError(f"{url!r} is no http address", where="--url", todo=URL_TODO)
    return Target(url.strip().rstrip("/").removesuffix("/v1").rstrip("/"), api_key)


@dataclass
class _Seen:
    """What one attempt has seen so far; `reused`: it went out on a connection that was open before; `patience_s`: what
    it may take where that is more than the limits say, `limit_s`: where it is less."""

    began: asyncio.Event
    patience_s: float = 0.0
    limit_s: float = math.inf
    status: int = 0
    streamed: bool = False
    reused: bool = False
    fault: Fault = ""
    detail: str = ""
    retry_after_s: float | None = None
    reads: list[tuple[int, bytes]] = field(default_factory=list)


async def _tell_reuse(session: aiohttp.ClientSession, context: Any, parameters: Any) -> None:
    context.trace_request_ctx.reused = True


class Client:
    """One session with one endpoint. Use as `async with Client(target) as client`."""

    def __init__(self, target: Target, limits: Limits = Limits()) -> None:
        self.target, self.limits = target, limits
        self.sent = 0
        self._end = time.monotonic() + limits.seconds
        self._session: aiohttp.ClientSession
        self._fresh: aiohttp.ClientSession
        self._streams: StreamClient

    async def __aenter__(self) -> Client:
        self._session = self._new_session(aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S))
        self._fresh = self._new_session(aiohttp.TCPConnector(limit=0, force_close=True))
        self._streams = await StreamClient(self.target, self.limits).__aenter__()
        return self

    def _new_session(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        key = self.target.api_key
        trace = aiohttp.TraceConfig()
        trace.on_connection_reuseconn.append(_tell_reuse)
        return aiohttp.ClientSession(
            connector=connector,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            trace_configs=[trace],
        )

    def _timeout(self, seen: _Seen) -> aiohttp.ClientTimeout:
        limits = self.limits
        return aiohttp.ClientTimeout(
            total=min(max(limits.request_s, seen.patience_s), seen.limit_s),
            sock_connect=limits.connect_s,
        )

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._fresh.close()
        await self._streams.__aexit__()

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    async def get(self, path: str) -> Reply:
        """The reply to GET `path`."""
        return await self._send("GET", path, None, scheduled_ns=None, cut_after=None, seen=_Seen(asyncio.Event()))

    async def ask(
        self,
        label: str,
        path: str,
        asked: Any,
        *,
        scheduled_ns: int | None = None,
        cut_after: int | None = None,
        began: asyncio.Event | None = None,
        patience_s: float = 0.0,
        limit_s: float = math.inf,
    ) -> Exchange:
        """POSTs `asked` as JSON (bytes as they are) and reads the answer, streamed or not.

        `cut_after`: closes the connection after this many chunks of the stream. `began`: set when the second read of
        the body comes, or when the request has ended without one. `patience_s`: how long it may be silent and take,
        where that is more than the limits say; `limit_s`: how long it may take, where that is less.
        """
        reply = await self.post(
            path,
            asked,
            scheduled_ns=scheduled_ns,
            cut_after=cut_after,
            began=began,
            patience_s=patience_s,
            limit_s=limit_s,
        )
        return Exchange(label, path, asked if isinstance(asked, dict) else {}, reply, read_answer(reply))

    async def post(
        self,
        path: str,
        asked: Any,
        *,
        scheduled_ns: int | None = None,
        cut_after: int | None = None,
        began: asyncio.Event | None = None,
        patience_s: float = 0.0,
        limit_s: float = math.inf,
    ) -> Reply:
        """The raw reply to POST `path`; nothing of it is decoded yet."""
        body = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
        seen = _Seen(began or asyncio.Event(), patience_s, limit_s)
        try:
            return await self._send("POST", path, body, scheduled_ns=scheduled_ns, cut_after=cut_after, seen=seen)
        finally:
            seen.began.set()

    async def post_in_load(self, path: str, asked: Any, *, scheduled_ns: int | None = None) -> Reply:
        """`post` for a phase of load: by the client that does least between the socket and the time stamp."""
        if self._used_up:
            sent = time.perf_counter_ns()
            return _unsent(sent if scheduled_ns is None else scheduled_ns, sent)
        self.sent += 1
        return await self._streams.post(path, json.dumps(asked).encode(), scheduled_ns=scheduled_ns)

    @property
    def _used_up(self) -> bool:
        return self.sent >= self.limits.requests or self.seconds_left <= 0

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        scheduled_ns: int | None,
        cut_after: int | None,
        seen: _Seen,
    ) -> Reply:
        sent = time.perf_counter_ns()
        scheduled = sent if scheduled_ns is None else scheduled_ns
        if self._used_up:
            return _unsent(scheduled, sent)
        self.sent += 1
        await self._exchange(self._session, method, path, body, cut_after, seen)
        if seen.fault == "dropped" and not seen.status and seen.reused:
            # the server had closed an idle connection: that drops nobody's request
            seen = _Seen(seen.began, seen.patience_s, seen.limit_s)
            await self._exchange(self._fresh, method, path, body, cut_after, seen)
        return Reply(
            seen.status,
            scheduled,
            sent,
            time.perf_counter_ns(),
            tuple(seen.reads),
            seen.fault,
            seen.detail,
            seen.streamed and seen.status == 200,
            seen.retry_after_s,
        )

    async def _exchange(
        self,
        session: aiohttp.ClientSession,
        method: str,
        path: str,
        body: bytes | None,
        cut_after: int | None,
        seen: _Seen,
    ) -> None:
        """One attempt on the wire, told to `seen`."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            async with session.request(
                method,
                self.target.base + path,
                data=body,
                headers=headers,
                allow_redirects=False,
                timeout=self._timeout(seen),
                trace_request_ctx=seen,
            ) as response:
                seen.status = response.status
                if 300 <= response.status < 400:
                    seen.detail = f"a redirect to {response.headers.get('Location', 'nowhere')}"
                seen.retry_after_s = retry_after(response.headers.get("Retry-After", ""))
                seen.streamed = response.content_type == "text/event-stream"
                fault, detail = await self._read(response, seen, cut_after)
                seen.fault, seen.detail = fault, detail or seen.detail
                if response.status >= 500:
                    response.close()  # servers close after a fault of their own, often without saying so
        except (aiohttp.ClientError, TimeoutError, OSError, ssl.SSLError, ValueError) as error:
            seen.fault, seen.detail = fault_of(error, answering=bool(seen.status))

    async def _read(self, response: aiohttp.ClientResponse, seen: _Seen, cut_after: int | None) -> tuple[Fault, str]:
        """Reads the body into `seen.reads`."""
        reads = seen.reads
        size = chunks = 0
        tail = b""
        clock = time.perf_counter_ns
        content = response.content
        while True:
            try:
                async with asyncio.timeout(max(self.limits.stall_s, seen.patience_s) if reads else None) as silence:
                    data = await content.readany()
            except TimeoutError:
                if not silence.expired():  # the time of the whole request is up
                    raise
                response.close()
                return "stalled", STALLED
            if not data:
                return "", ""
            reads.append((clock(), data))
            if len(reads) > 1:  # the first may hold the role alone, which is no answer yet
                seen.began.set()
            size += len(data)
            if size > self.limits.body_bytes:
                response.close()
                return "flood", f"more than {self.limits.body_bytes >> 20} MiB in one answer"
            if cut_after is not None:
                chunks += data.count(b"data:")
                if chunks >= cut_after:
                    response.close()
                    return "cut", ""
            tail = (tail + data)[-len(_END) - 4 :]  # the mark may be cut over two reads
            if seen.streamed and tail.rstrip().endswith(_END):
                return await self._linger(response, reads)

    async def _linger(self, response: aiohttp.ClientResponse, reads: list[tuple[int, bytes]]) -> tuple[Fault, str]:
        """After the end mark: what still comes is kept, and a connection that is not ended is closed without blame."""
        try:
            async with asyncio.timeout(LINGER_S):
                while data := await response.content.readany():
                    reads.append((time.perf_counter_ns(), data))
        except (TimeoutError, aiohttp.ClientError):
            response.close()
        return "", ""


def _unsent(scheduled: int, sent: int) -> Reply:
    return Reply(0, scheduled, sent, sent, fault="unsent", detail="the bounds of this run were reached")


def fault_of(error: BaseException, *, answering: bool) -> tuple[Fault, str]:
    """The name of what went wrong on the wire and a sentence; `answering`: the status line had come."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError)):
        return "refused", text
    if isinstance(error, TimeoutError):
        return ("late", LATE) if answering else ("silent", SILENT)
    gone = (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, ConnectionError)
    if isinstance(error, gone):
        return "dropped", "the connection ended inside the answer" if answering else "the connection ended, no answer"
    return "garbage", text


def retry_after(value: str, now: float | None = None) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or as a date, never less than 0; None where it says
    neither. `now`: seconds since the epoch. Source: RFC 9110, section 10.2.3."""
    if value.strip().isdecimal():
        return float(value)
    try:
        at = parsedate_to_datetime(value).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0.0, at - (time.time() if now is None else now))
