"""An event loop that reads streams on its way: a chunk costs a read and a stamp, not a turn of the loop.

asyncio spends several times what a read costs on being told of it. Here the selector of the loop reads the sockets of
streams itself, as soon as they have something, and the loop hears of an answer when it has ended.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import socket
import time
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from day0check.load.raw_http import Connection

READ_BYTES = 1 << 16
Given = TypeVar("Given")
AVAILABLE = hasattr(select, "epoll")  # Linux; elsewhere streams go over asyncio's transports


def run_streams(work: Coroutine[Any, Any, Given]) -> Given:
    """What `work` gives, on a loop that reads streams where the system can, else on the usual one."""
    given: list[Given] = []

    async def kept() -> None:
        given.append(await work)  # asyncio writes out what its main task gives, every read of a load

    with asyncio.Runner(loop_factory=StreamLoop if AVAILABLE else None) as runner:
        runner.run(kept())
    return given[0]


class StreamLoop(asyncio.SelectorEventLoop):
    """The loop of asyncio over a StreamSelector, which is `streams`."""

    def __init__(self) -> None:
        self.streams = StreamSelector()
        super().__init__(self.streams)

    async def connect_stream(self, host: str, port: int) -> Connection:
        """An open connection over plain TCP. Raises OSError when no address of `host` can be reached."""
        refused: OSError | None = None
        for family, kind, protocol, _, address in await self.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            end = socket.socket(family, kind, protocol)
            try:
                end.setblocking(False)
                await self.sock_connect(end, address)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                end.close()
                refused = error
            except BaseException:
                end.close()
                raise
            else:
                return self.streams.take(end)
        raise refused or OSError(f"{host} has no address")


class StreamSelector(selectors.BaseSelector):
    """The system's selector for all that asyncio does, and beside it the sockets of streams, which are read here."""

    def __init__(self) -> None:
        self._others = selectors.DefaultSelector()
        self._epoll = select.epoll()
        self._epoll.register(self._others.fileno(), select.EPOLLIN)
        self._sockets: dict[int, StreamSocket] = {}
        self._buffer = memoryview(bytearray(READ_BYTES))

    def take(self, end: socket.socket) -> Connection:
        """The connection over a connected socket that does not block; it belongs to this selector from now on."""
        connection = Connection()
        carrier = StreamSocket(end, connection, self._epoll, self._sockets)
        self._sockets[end.fileno()] = carrier
        self._epoll.register(end.fileno(), select.EPOLLIN)
        connection.made(carrier)
        return connection

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """What asyncio waits for, after `timeout` seconds at the latest (None: no limit). Comes back with nothing when
        an answer has ended: somebody waits for that."""
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            others = ended = False
            for number, what in self._epoll.poll(timeout if timeout is None or timeout > 0 else 0):
                carrier = self._sockets.get(number)
                if carrier is None:
                    others = True
                else:
                    ended = carrier.ready(what, self._buffer) or ended
            if others:
                return self._others.select(0)
            if ended:
                return []
            if until is not None:
                timeout = until - time.monotonic()
                if timeout <= 0:
                    return []

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._others.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._others.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._others.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._others.get_map()

    def close(self) -> None:
        for carrier in list(self._sockets.values()):
            carrier.abort()
        self._epoll.close()
        self._others.close()


class StreamSocket:
    """A connected TCP socket that a StreamSelector reads."""

    def __init__(
        self, end: socket.socket, connection: Connection, epoll: select.epoll, sockets: dict[int, StreamSocket]
    ) -> None:
        self._socket, self._connection, self._epoll, self._sockets = end, connection, epoll, sockets
        self._rest, self._waits = b"", False  # of what is to be sent, when the other side takes it slowly

    def write(self, data: bytes) -> None:
        self._rest += data
        self._send()

    def _send(self) -> None:
        try:
            self._rest = self._rest[self._socket.send(self._rest) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost(error)
            return
        if self._waits != bool(self._rest):
            self._waits = bool(self._rest)
            self._epoll.modify(self._socket.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._waits else 0))

    def ready(self, events: int, buffer: memoryview) -> bool:
        """Sends and reads what can be; whether nobody waits for this connection any more."""
        if events & select.EPOLLOUT and self._waits:
            self._send()
        if events & ~select.EPOLLOUT and self._socket.fileno() >= 0:
            try:
                count = self._socket.recv_into(buffer)
            except BlockingIOError:
                return False
            except OSError as error:
                self._lost(error)
                return True
            if count == 0:
                self._lost(None)
                return True
            self._connection.received(bytes(buffer[:count]))
        return not self._connection.waited_for

    def _lost(self, error: OSError | None) -> None:
        self.abort()
        self._connection.lost(error)

    def abort(self) -> None:
        """Closes at once; again is no fault."""
        number = self._socket.fileno()
        if number >= 0:
            del self._sockets[number]
            self._epoll.unregister(number)
            self._socket.close()
