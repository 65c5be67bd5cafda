"""HTTP/1.1 answers as they come off a socket: nothing is decoded while they come, only their end is looked for.

The framing (RFC 9112, 6 and 7) is undone when a load is over, so that a read costs the client a time stamp and an
append. One answer at a time and connection; no pipelining, no upgrade.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Literal, Protocol

HEAD_BYTES = 1 << 16
READ_BYTES = 1 << 16
END_OF_HEAD, LAST_CHUNK, DONE = b"\r\n\r\n", b"0\r\n\r\n", b"[DONE]"
Ending = Literal["chunked", "length", "close"]
Reads = list[tuple[int, bytes]]


class BadHttp(ValueError):
    """What came is no HTTP/1.1 answer."""


@dataclass(frozen=True)
class Head:
    """Status line and the headers that say how the body ends."""

    status: int
    ending: Ending
    length: int
    keeps: bool
    streamed: bool
    size: int  # bytes of the head itself


def read_head(data: bytes) -> Head | None:
    """The head of an answer, None while it is not complete. Raises BadHttp."""
    end = data.find(END_OF_HEAD)
    if end < 0:
        if len(data) > HEAD_BYTES or (len(data) >= 5 and not data.startswith(b"HTTP/")):
            raise BadHttp("the answer does not begin like HTTP")
        return None
    first, *lines = data[:end].split(b"\r\n")
    parts = first.split(b" ", 2)
    if len(parts) < 2 or not parts[0].startswith(b"HTTP/1.") or not parts[1].isdigit():
        raise BadHttp(f"the status line is {first[:40]!r}")
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    status = int(parts[1])
    connection = fields.get(b"connection", b"").lower()
    chunked = fields.get(b"transfer-encoding", b"").lower().endswith(b"chunked")
    length = fields.get(b"content-length", b"")
    if not chunked and length and not length.isdigit():
        raise BadHttp(f"the content length is {length[:20]!r}")
    empty = status in (204, 304)
    ending: Ending = "chunked" if chunked else "length" if length or empty else "close"
    return Head(
        status,
        ending,
        0 if empty else int(length or 0),
        ending != "close" and connection != b"close" and parts[0] == b"HTTP/1.1",
        fields.get(b"content-type", b"").lower().startswith(b"text/event-stream"),
        end + len(END_OF_HEAD),
    )


def unframed(reads: Reads, head: Head) -> tuple[Reads, bool]:
    """(the body's bytes by the time at which they came, whether the body is complete)."""
    skip, body = head.size, []
    for at, data in reads:
        if skip < len(data):
            body.append((at, data[skip:]))
        skip = max(0, skip - len(data))
    if head.ending == "chunked":
        return _unchunked(body)
    size = sum(len(data) for _, data in body)
    return body, head.ending == "close" or size >= head.length


def _unchunked(reads: Reads) -> tuple[Reads, bool]:
    """Chunk sizes taken out; raises BadHttp for a size that is none."""
    found: Reads = []
    left, rest, at_end = 0, b"", False  # of the present chunk with its line end; an incomplete size line
    for at, data in reads:
        data, rest, pieces = rest + data, b"", []
        place = 0
        while place < len(data) and not at_end:
            if left > 0:
                take = data[place : place + left]
                pieces.append(take[: max(0, min(len(take), left - 2))])
                place, left = place + len(take), left - len(take)
                continue
            line_end = data.find(b"\r\n", place)
            if line_end < 0:
                rest = data[place:]
                break
            size = _size(data[place:line_end])
            place, at_end = line_end + 2, size == 0
            left = size + 2
        body = b"".join(pieces)
        if body:
            found.append((at, body))
    return found, at_end


def _size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0].strip() or b"x", 16)
    except ValueError as error:
        raise BadHttp(f"a chunk has the size {line[:20]!r}") from error


class Carrier(Protocol):
    """What moves a connection's bytes."""

    def write(self, data: bytes) -> None: ...

    def abort(self) -> None:
        """Closes at once; again is no fault."""


class Connection:
    """One connection. `ask` sends a request; the future that it gets is done when the answer is complete or broken.
    Its carrier says when it is `made`, what was `received`, and that it is `lost`.

    `body`: the answer without its framing, once it is complete;
    `error`: why an answer is broken ("" when it is not); `reads`: what came, with perf_counter nanoseconds; `done_ns`:
    when the end mark of an event stream came, 0 before; `lingers`: it was still open a while after that.
    """

    def __init__(self) -> None:
        self.carrier: Carrier | None = None
        self.head: Head | None = None
        self.reads: Reads = []
        self.body: Reads | None = None
        self.error = ""
        self.size = self.latest_ns = self.done_ns = 0
        self.open = self.lingers = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def in_body(self) -> bool:
        """Whether a byte behind the head has come."""
        return self.head is not None and self.size > self.head.size

    def made(self, carrier: Carrier) -> None:
        self.carrier, self.open = carrier, True

    def ask(self, data: bytes, waiter: asyncio.Future[None]) -> None:
        self.head, self.reads, self.body, self.error = None, [], None, ""
        self.size = self.done_ns = 0
        self.latest_ns, self._waiter = time.perf_counter_ns(), waiter
        self.carrier.write(data)

    def received(self, data: bytes) -> None:
        now = time.perf_counter_ns()
        self.reads.append((now, data))
        self.latest_ns = now
        self.size += len(data)
        head = self.head
        if head is None:
            self._try_head()
        elif head.ending == "chunked":
            if data.endswith(LAST_CHUNK) or len(data) < len(LAST_CHUNK):
                self._look_for_end()
            elif DONE in data:
                self.done_ns = now
        elif head.ending == "length":
            if self.size >= head.size + head.length:
                self.end("")
        elif DONE in data:
            self.done_ns = now

    def _try_head(self) -> None:
        try:
            self.head = read_head(b"".join(data for _, data in self.reads))
        except BadHttp as error:
            self.end(str(error))
            return
        if self.head is None:
            return
        if 100 <= self.head.status < 200:
            self.reads = [(self.latest_ns, b"".join(data for _, data in self.reads)[self.head.size :])]
            self.head = None
            self._try_head()
        else:
            self._look_for_end()

    def _look_for_end(self) -> None:
        """The whole framing once more: an answer's own bytes may look like its end."""
        try:
            body, complete = unframed(self.reads, self.head)
        except BadHttp as error:
            self.end(str(error))
            return
        if complete and self.head.ending != "close":
            self.body = body
            self.end("")
        elif body and DONE in body[-1][1]:
            self.done_ns = self.latest_ns

    def lost(self, error: Exception | None) -> None:
        self.open = False
        whole = self.head is not None and self.head.ending == "close" and error is None
        self.end("" if whole else "dropped")

    def end(self, error: str) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            self.error = error
            waiter.set_result(None)

    @property
    def waited_for(self) -> bool:
        """Whether somebody waits for the end of an answer."""
        return self._waiter is not None

    @property
    def reusable(self) -> bool:
        return self.open and not self.error and not self.lingers and self.head is not None and self.head.keeps

    def close(self) -> None:
        if self.carrier is not None:
            self.carrier.abort()


class Transport(asyncio.BufferedProtocol):
    """A connection over a transport of asyncio, which knows TLS and runs everywhere.

    It reads into a buffer of its own: asyncio's other way takes 256 KiB from the system for each read and gives all but
    one page back, which costs more than all the rest of a read.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._buffer = memoryview(bytearray(READ_BYTES))

    @classmethod
    async def connect(cls, host: str, port: int, *, context: ssl.SSLContext | None) -> Connection:
        """Raises OSError and ssl.SSLError when there is no connection."""
        connection = Connection()
        await asyncio.get_running_loop().create_connection(lambda: cls(connection), host, port, ssl=context)
        return connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._connection.made(transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._connection.received(bytes(self._buffer[:nbytes]))

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.lost(error)
