"""The client of the load phases: many streams in one thread, each read stamped as it comes off the socket."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from day0check.load.raw_http import BadHttp, Connection, Transport, unframed
from day0check.load.records import Fault, Reply
from day0check.load.stream_loop import StreamLoop

if TYPE_CHECKING:
    from day0check.load.client import Limits, Target

WATCH_EVERY_S = 0.05
IDLE_S = 1.0  # shorter than any server keeps one
SILENT, STALLED, LATE = "no byte came in time", "no byte came for too long", "the answer was not complete in time"
LINGER_NS = 200_000_000  # after [DONE] the connection may stay open this long


@dataclass
class _Going:
    """A request on its way: what the watch looks at."""

    connection: Connection
    sent_ns: int
    fault: Fault = ""
    detail: str = ""


@dataclass
class StreamClient:
    """POSTs to one address. Use as `async with StreamClient(target, limits) as client`."""

    target: Target
    limits: Limits
    _idle: deque[tuple[float, Connection]] = field(default_factory=deque)

    async def __aenter__(self) -> StreamClient:
        parts = urlsplit(self.target.base)
        self._host, self._secure = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._secure else 80)
        key = f"Authorization: Bearer {self.target.api_key}\r\n" if self.target.api_key else ""
        self._head = f"Host: {parts.netloc}\r\n{key}Content-Type: application/json\r\nAccept: */*\r\n"
        self._prefix = parts.path
        self._open: dict[int, _Going] = {}
        self._watch = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        for _, connection in self._idle:
            connection.close()
        for going in self._open.values():
            going.connection.close()
        await asyncio.sleep(0)

    async def post(self, path: str, body: bytes, *, scheduled_ns: int | None = None) -> Reply:
        """The raw reply. Times are of the socket; the framing is undone here, when the answer is complete."""
        sent = time.perf_counter_ns()
        scheduled = sent if scheduled_ns is None else scheduled_ns
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        data = head.encode("latin-1") + body
        connection, reused = self._take(), True
        if connection is None:
            reused = False
            try:
                connection = await self._connect()
            except (OSError, TimeoutError, ssl.SSLError) as error:
                return _failed(scheduled, sent, "refused", " ".join(str(error).split()) or type(error).__name__)
        reply = await self._exchange(connection, data, scheduled, sent)
        if reused and reply.fault == "dropped" and not reply.status:
            # the server had closed an idle connection: that drops nobody's request
            try:
                connection = await self._connect()
            except (OSError, TimeoutError, ssl.SSLError) as error:
                return _failed(scheduled, sent, "refused", " ".join(str(error).split()) or type(error).__name__)
            reply = await self._exchange(connection, data, scheduled, sent)
        return reply

    async def _exchange(self, connection: Connection, data: bytes, scheduled: int, sent: int) -> Reply:
        waiter = asyncio.get_running_loop().create_future()
        going = _Going(connection, sent)
        self._open[id(going)] = going
        try:
            connection.ask(data, waiter)
            await waiter
        finally:
            del self._open[id(going)]
            if not waiter.done() or not connection.reusable or going.fault:
                connection.close()
            else:
                self._idle.append((time.monotonic(), connection))
        return _reply(connection, going, scheduled, sent)

    def _take(self) -> Connection | None:
        """An open connection that was used a moment ago; older ones are closed."""
        now = time.monotonic()
        while self._idle:
            since, connection = self._idle.pop()
            if connection.open and now - since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.limits.connect_s):
            if not self._secure and isinstance(loop, StreamLoop):
                return await loop.connect_stream(self._host, self._port)
            context = ssl.create_default_context() if self._secure else None
            return await Transport.connect(self._host, self._port, context=context)

    async def _look(self) -> None:
        """Ends what stands still, takes too long, says too much, or stays open behind its end mark."""
        stall, whole = int(self.limits.stall_s * 1e9), int(self.limits.request_s * 1e9)
        while True:
            await asyncio.sleep(WATCH_EVERY_S)
            now = time.perf_counter_ns()
            for going in list(self._open.values()):
                connection = going.connection
                if connection.done_ns:
                    if now - connection.done_ns > LINGER_NS:
                        connection.lingers = True
                        connection.end("")
                    continue
                if now - going.sent_ns > whole:
                    going.fault, going.detail = ("late", LATE) if connection.head else ("silent", SILENT)
                elif connection.in_body and now - connection.latest_ns > stall:
                    going.fault, going.detail = "stalled", STALLED
                elif connection.size > self.limits.body_bytes:
                    most = self.limits.body_bytes >> 20
                    going.fault, going.detail = "flood", f"more than {most} MiB in one answer"
                if going.fault:
                    connection.end(going.fault)


def _reply(connection: Connection, going: _Going, scheduled: int, sent: int) -> Reply:
    head, end = connection.head, connection.latest_ns
    fault, detail = going.fault, going.detail
    reads = connection.body or []
    if head is not None and connection.body is None:
        with contextlib.suppress(BadHttp):  # then `error` says so
            reads, _ = unframed(connection.reads, head)
    if connection.error and not fault:
        status = "the connection ended inside the answer" if head else "the connection ended, no answer"
        fault, detail = ("dropped", status) if connection.error == "dropped" else ("garbage", connection.error)
    status = head.status if head is not None else 0
    streamed = head is not None and head.streamed and status == 200
    return Reply(status, scheduled, sent, end, tuple(reads), fault, detail, streamed)


def _failed(scheduled: int, sent: int, fault: Fault, detail: str) -> Reply:
    return Reply(0, scheduled, sent, time.perf_counter_ns(), fault=fault, detail=detail)
