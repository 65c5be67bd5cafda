"""The HTTP side: routes, limits, streaming. It never waits for the engine but through queues."""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from day0check.accelerated.server import openapi
from day0check.accelerated.server.engine_thread import EngineThread, Full
from day0check.accelerated.server.images import ImageLimits
from day0check.accelerated.server.orders import Done, Event, Failed, Order
from day0check.accelerated.server.parsing import parse
from day0check.accelerated.server.planning import Refused, Served, plan_chat, plan_completion
from day0check.accelerated.server.replies import (
    ChatChoice,
    CompletionChoice,
    Json,
    Usage,
    join_chat,
    join_completion,
)
from day0check.accelerated.server.schema import Asked, ChatRequest, CompletionRequest
from day0check.errors import Unavailable

INLINE_BYTES = 1 << 16  # larger bodies are parsed in a thread
RETRY_SECONDS = "1"
Kind = TypeVar("Kind", bound=Asked)


@dataclass(frozen=True)
class HttpOptions:
    name: str
    api_key: str | None = None
    body_bytes: int = 64 << 20
    body_seconds: float = 30.0
    write_seconds: float = 30.0  # a client that does not read for so long is gone
    max_prompts: int = 64
    images: ImageLimits = field(default_factory=ImageLimits)


class EngineFailed(Exception):
    """An answer that broke before its first byte."""

    def __init__(self, event: Failed) -> None:
        super().__init__(event.message)
        self.event = event


class Service:
    """The application over one engine thread. `draining` refuses new work and lets the open work end."""

    def __init__(self, engine: EngineThread, options: HttpOptions) -> None:
        self.engine, self.options = engine, options
        self.draining = False
        self.created = int(time.time())
        self._folder = Path(tempfile.mkdtemp(prefix="day0check-serve-"))
        self.silent: set[Any] = set()  # young connections that have not sent a request head yet

    def application(self) -> web.Application:
        app = web.Application(client_max_size=self.options.body_bytes, middlewares=[self._errors, self._key])
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/metrics", self.metrics),
                web.get("/openapi.json", self.openapi),
                web.get("/v1/models", self.models),
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat),
            ]
        )
        app.on_cleanup.append(self._clean_up)
        return app

    async def _clean_up(self, _: web.Application) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------------------------- middlewares

    @web.middleware
    async def _errors(self, request: web.Request, handler: Callable[..., Awaitable[Any]]) -> web.StreamResponse:
        self.silent.discard(request.protocol)
        try:
            return await handler(request)
        except Refused as error:
            response = error_response(error.status, error.message, param=error.param, code=error.code)
            response.headers.update(error.headers)
        except EngineFailed as error:
            response = error_response(503 if error.event.shutting_down else 500, error.event.message)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            response = error_response(error.status, error.reason, code="http")
            response.headers.update({k: v for k, v in error.headers.items() if k == "Allow"})
        self.engine.metrics.refused(response.status)
        return response

    @web.middleware
    async def _key(self, request: web.Request, handler: Callable[..., Awaitable[Any]]) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        key = self.options.api_key
        if key and request.path.startswith("/v1/") and not hmac.compare_digest(given, f"Bearer {key}".encode()):
            raise Refused("the API key is missing or wrong", status=401, code="invalid_api_key")
        return await handler(request)

    # ------------------------------------------------------------------------------------------------ routes

    async def health(self, _: web.Request) -> web.Response:
        ready, body = self.engine.health()
        if self.draining:
            ready, body = False, {**body, "status": "draining"}
        return web.json_response(body, status=200 if ready else 503, headers={} if ready else {"Retry-After": "1"})

    async def metrics(self, _: web.Request) -> web.Response:
        text = self.engine.metrics.text()
        return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def openapi(self, _: web.Request) -> web.Response:
        return web.json_response(openapi.document(self.options.name))

    async def models(self, _: web.Request) -> web.Response:
        entry = {"id": self.options.name, "object": "model", "created": self.created, "owned_by": "day0check"}
        known = self.engine.max_model_len
        if known:
            entry["max_model_len"] = known
        return web.json_response({"object": "list", "data": [entry]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = await self._asked(request, CompletionRequest)
        served, name = self._served(), f"cmpl-{secrets.token_hex(12)}"
        orders = await asyncio.to_thread(plan_completion, asked, served, request_id=name)
        choices = [CompletionChoice(n, o, asked, served.vocabulary) for n, o in enumerate(orders)]
        head = self._head(name, "text_completion")
        async with self._events(orders) as events:
            if asked.stream:
                return await self._streamed(request, head, choices, events, asked)
            chunks = await _all(choices, events)
        body = {**head, "choices": [join_completion(c) for c in chunks], "usage": _usage(choices).json()}
        return _json(body)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = await self._asked(request, ChatRequest)
        served, name = self._served(), f"chatcmpl-{secrets.token_hex(12)}"
        folder = self._folder / name
        folder.mkdir()
        try:
            order, schemas = await asyncio.to_thread(plan_chat, asked, served, request_id=name, folder=folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        choice = ChatChoice(order, asked, served.vocabulary, self.engine.operators, schemas)
        head = self._head(name, "chat.completion")
        async with self._events([order], folder) as events:
            if asked.stream:
                head["object"] = "chat.completion.chunk"
                return await self._streamed(request, head, [choice], events, asked)
            (chunks,) = await _all([choice], events)
        body = {**head, "choices": [join_chat(chunks)], "usage": _usage([choice]).json(), **choice.extra()}
        return _json(body)

    # ----------------------------------------------------------------------------------------------- requests

    def _served(self) -> Served:
        """Raises Refused (503) while there is no engine to plan for."""
        ready, body = self.engine.health()
        if self.draining or not ready:
            status = "draining" if self.draining else body["status"]
            raise _later(f"the server is {status}", status=503, code=status)
        e, o = self.engine, self.options
        return Served(o.name, e.config, e.vocabulary, e.max_model_len, max_prompts=o.max_prompts, images=o.images)

    async def _asked(self, request: web.Request, kind: type[Kind]) -> Kind:
        self._served()  # before megabytes are read
        if request.content_type != "application/json":
            raise Refused("the body must be application/json", status=415, code="content_type")
        length = request.content_length
        if length is not None and length > self.options.body_bytes:
            raise Refused(f"the body has more than {self.options.body_bytes} bytes", status=413, code="too_large")
        try:
            async with asyncio.timeout(self.options.body_seconds):
                body = await request.read()
        except TimeoutError as error:
            raise Refused("the body did not come in time", status=408, code="timeout") from error
        except web.HTTPRequestEntityTooLarge as error:
            limit = self.options.body_bytes
            raise Refused(f"the body has more than {limit} bytes", status=413, code="too_large") from error
        asked = parse(body, kind) if len(body) <= INLINE_BYTES else await asyncio.to_thread(parse, body, kind)
        if asked.model != self.options.name:
            message = f"there is no model {asked.model!r}; this server has {self.options.name!r}"
            raise Refused(message, status=404, param="model", code="model_not_found")
        return asked

    def _head(self, name: str, kind: str) -> Json:
        return {"id": name, "object": kind, "created": int(time.time()), "model": self.options.name}

    @asynccontextmanager
    async def _events(
        self, orders: list[Order], folder: Path | None = None
    ) -> AsyncIterator[AsyncIterator[tuple[int, Event]]]:
        """Events of the orders until all have ended. Leaving early, for whatever reason, ends the rest."""
        loop, arriving = asyncio.get_running_loop(), asyncio.Queue()
        left = set(range(len(orders)))

        def send(number: int, event: Event) -> None:
            try:
                loop.call_soon_threadsafe(arriving.put_nowait, (number, event))
            except RuntimeError:  # the loop has ended before the engine
                pass

        async def events() -> AsyncIterator[tuple[int, Event]]:
            while left:
                number, event = await arriving.get()
                if isinstance(event, (Done, Failed)):
                    left.discard(number)
                yield number, event

        def clean_up() -> None:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

        try:
            self.engine.submit(orders, send)
            yield events()
        except Full as error:
            raise _later("too many requests wait already", status=429, code="queue_full") from error
        except Unavailable as error:
            raise _later(str(error), status=503, code="not_ready") from error
        finally:
            self.engine.release([orders[number].id for number in left], then=clean_up)

    async def _streamed(
        self, request: web.Request, head: Json, choices: list[Any], events: Any, asked: Asked
    ) -> web.StreamResponse:
        """Server-sent events. The status waits for the engine's first word, so that a failure is no 200."""
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        try:
            async for lines in _lines(head, choices, events, asked):
                if not response.prepared:
                    await response.prepare(request)
                async with asyncio.timeout(self.options.write_seconds):
                    await response.write(b"".join(b"data: " + line + b"\n\n" for line in lines))
            async with asyncio.timeout(self.options.write_seconds):
                await response.write_eof()
        except (TimeoutError, ConnectionError):  # the client is gone or does not read
            if request.transport is not None:
                request.transport.abort()
        except EngineFailed as error:
            if not response.prepared:
                raise
            line = _dumps({"error": error_body(str(error), 500)})
            async with asyncio.timeout(self.options.write_seconds):
                await response.write(b"data: " + line + b"\n\n")
        return response


async def _lines(head: Json, choices: list[Any], events: Any, asked: Asked) -> AsyncIterator[list[bytes]]:
    """The data of the server-sent events, those of one event of the engine together. Raises EngineFailed."""
    options = asked.options()
    extra = [choice.extra() if isinstance(choice, ChatChoice) else {} for choice in choices]
    async for number, event in events:
        if isinstance(event, Failed):
            raise EngineFailed(event)
        made = []
        for chunk in choices[number].feed(event):
            line = {**head, "choices": [chunk], **extra[number]}
            extra[number] = {}
            if options.continuous_usage_stats:
                line["usage"] = _usage([choices[number]]).json()
            elif options.include_usage:
                line["usage"] = None
            made.append(_dumps(line))
        if made:
            yield made
    last = [_dumps({**head, "choices": [], "usage": _usage(choices).json()})] if options.include_usage else []
    yield [*last, b"[DONE]"]


async def _all(choices: list[Any], events: AsyncIterator[tuple[int, Event]]) -> list[list[Json]]:
    chunks: list[list[Json]] = [[] for _ in choices]
    async for number, event in events:
        if isinstance(event, Failed):
            raise EngineFailed(event)
        chunks[number] += choices[number].feed(event)
    return chunks


def _usage(choices: list[Any]) -> Usage:
    return Usage(sum(len(c.order.prompt) for c in choices), sum(c.completion_tokens for c in choices))


def _later(message: str, *, status: int, code: str) -> Refused:
    refused = Refused(message, status=status, code=code)
    refused.headers["Retry-After"] = RETRY_SECONDS
    return refused


def _dumps(value: Json) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def _json(body: Json) -> web.Response:
    return web.Response(body=_dumps(body), content_type="application/json")


def error_body(message: str, status: int, *, param: str | None = None, code: str | None = None) -> Json:
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": message, "type": kind, "param": param, "code": code}


def error_response(status: int, message: str, *, param: str | None = None, code: str | None = None) -> web.Response:
    body = {"error": error_body(message, status, param=param, code=code)}
    return web.json_response(body, status=status)
