"""Sockets, signals and the order of start and end: listen, start the engine, serve, drain, stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from day0check.accelerated.server.engine_thread import EngineThread
from day0check.accelerated.server.http import Service
from day0check.errors import UsageError

POLL_SECONDS = 0.02
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True)
class ListenOptions:
    """`port` 0: any free one. `first_request_seconds`: how long a new connection may take to send its first head."""

    host: str = "127.0.0.1"
    port: int = 8000
    connections: int = 1024
    first_request_seconds: float = 20.0
    drain_seconds: float = 30.0


class _Busy(asyncio.Protocol):
    """Tells a connection too many so, and closes it."""

    def connection_made(self, transport: Any) -> None:
        transport.write(BUSY)
        transport.close()


@asynccontextmanager
async def listening(service: Service, options: ListenOptions) -> Any:
    """The server on its socket; gives its URL. Raises UsageError when the address cannot be had.

    A connection beyond `connections` is told to come back; one that never sends a request is closed.
    """
    loop, application = asyncio.get_running_loop(), service.application()
    runner = web.AppRunner(
        application,
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=30.0,
        lingering_time=0.1,  # what a refused body still sends is read for so long: a gigabyte takes longer
        shutdown_timeout=1.0,
    )
    await runner.setup()

    def connect() -> asyncio.Protocol:
        if len(runner.server.connections) >= options.connections:
            return _Busy()
        protocol = runner.server()
        service.silent.add(protocol)
        loop.call_later(options.first_request_seconds, _close_silent, service, protocol)
        return protocol

    try:
        server = await loop.create_server(connect, options.host, options.port, backlog=1024)
    except OSError as error:
        await runner.cleanup()
        raise UsageError(
            f"cannot listen: {error.strerror or error}",
            where=f"{options.host}:{options.port}",
            todo="give another --host or --port; --port 0 takes a free one",
        ) from error
    host, port = server.sockets[0].getsockname()[:2]
    try:
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        server.close()
        await runner.cleanup()
        await server.wait_closed()


def _close_silent(service: Service, protocol: Any) -> None:
    """Closes a connection that has not sent a whole request head since it was made."""
    if protocol in service.silent:
        service.silent.discard(protocol)
        protocol.force_close()


async def serve(service: Service, options: ListenOptions, *, tell: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT, then lets open answers end for `drain_seconds`; a second signal ends them.

    `tell` gets the URL first, then a line for each turn of events. Raises what ended the start of the engine.
    """
    loop, stop, again = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def signalled() -> None:
        (again if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled)
    try:
        async with listening(service, options) as url:
            tell(url)
            service.engine.start()
            await _until_ready(service.engine, stop)
            if service.engine.state.phase == "ready":
                tell(_ready_line(service.engine))
            await _while_alive(service.engine, stop)
            service.draining = True
            if service.engine.state.phase != "dead":
                tell(f"stopping: {service.engine.open_requests()} answers on their way")
            await drain(service.engine, options.drain_seconds, again)
            await asyncio.to_thread(service.engine.stop, 10.0)
            await asyncio.sleep(POLL_SECONDS)  # the last events on their way to their clients
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    error = service.engine.state.error
    if error is not None:
        raise error


async def _until_ready(engine: EngineThread, stop: asyncio.Event) -> None:
    while engine.state.phase == "starting" and not stop.is_set():
        await asyncio.sleep(POLL_SECONDS)


async def _while_alive(engine: EngineThread, stop: asyncio.Event) -> None:
    """Until a signal; an engine that died at its start ends the server, one that died later stays to say so."""
    if engine.state.phase == "dead":
        return
    await stop.wait()


async def drain(engine: EngineThread, seconds: float, again: asyncio.Event) -> None:
    """Waits until no answer is open, for at most `seconds` or until `again`."""
    end = asyncio.get_running_loop().time() + seconds
    while engine.open_requests() and not again.is_set() and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(POLL_SECONDS)


def _ready_line(engine: EngineThread) -> str:
    steps = "; ".join(
        f"{step.name} {step.seconds:.2f} s" + (f" ({step.note})" if step.note else "") for step in engine.state.steps
    )
    return f"ready in {sum(step.seconds for step in engine.state.steps):.2f} s: {steps}"
