"""A scripted endpoint on 127.0.0.1: a small deterministic language model behind OpenAI's forms, well-behaved or with
any of the faults that `FAULTS` names. Benign habits (`BENIGN`) must raise nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import random
import re
import threading
import time
from collections.abc import Iterator
from typing import Any

from aiohttp import web

FAULTS = (
    "mute stall drop truncate no_done no_usage wrong_usage wrong_prompt_usage garbage html error_after_200 zero_chunks "
    "lost_chunk doubled_chunk reordered cut_characters ignores_stop ignores_max_tokens ignores_logprobs ignores_n "
    "ignores_echo ignores_seed ignores_temperature accepts_bad crashes_on_bad leaks batch_dependent wrong_logprobs "
    "stale_image history_ignored hangs_after_cancel leaks_slots wrong_finish dead unlike slow_start bunched late "
    "ignores_tools drops_calls broken_arguments impossible_logprobs leaks_cache warm_prefix_differs surge_differs "
    "forgets_the_middle merged_events shows_the_stop stumbles never_recovers"
).split()
BENIGN = (
    "merged",
    "split",
    "slow",
    "completions_only",
    "plain",
    "no_metrics",
    "keeps_open",
    "reasoning",
    "refuses_tools",
    "short_context",
    "names_context",
    "preempts",
    "starting",
    "late_first",
)
CONTEXT = 600  # tokens, which are bytes
PLACES = 24  # requests that fill the cache of the one that preempts

WORDS = (
    " the",
    " sea",
    " 海",
    " é",
    "👍",
    " of",
    " runs",
    " blue",
    " то",
    "ing",
    " and",
    "!",
    " w",
    " x",
    " q",
    " stone",
)


class Endpoint:
    """`flags`: names out of FAULTS and BENIGN. `delay_s`: between chunks."""

    def __init__(self, *flags: str, delay_s: float = 0.0) -> None:
        unknown = set(flags) - set(FAULTS) - set(BENIGN)
        assert not unknown, unknown
        self.flags, self.delay_s = frozenset(flags), delay_s
        self.running = self.stuck = self.requests = self.kept = 0
        self.hung = False
        self.first_image = ""
        self.passwords: list[str] = []
        self.seen: set[str] = set()
        self.preemptions = self.looks = 0
        self.ready_at = 0.0  # by the monotonic clock
        self.left = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/v1/models", self.models)
        if "no_metrics" not in self.flags:
            app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/health", self.health)
        if "completions_only" not in self.flags:
            app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_post("/v1/completions", self.answer)
        return app

    async def health(self, _: web.Request) -> web.Response:
        self.looks += 1
        return web.Response(status=503 if self.is_starting or self.stumbled else 200)

    @property
    def stumbled(self) -> bool:
        """A server that looks after itself from its sixth request on: for half a second, or for good."""
        if self.requests == 6 and not self.ready_at and self.flags & {"stumbles", "never_recovers"}:
            self.ready_at = time.monotonic() + (0.5 if "stumbles" in self.flags else 3600)
        return time.monotonic() < self.ready_at

    @property
    def is_starting(self) -> bool:
        return "starting" in self.flags and self.looks < 3

    async def models(self, _: web.Request) -> web.Response:
        model = {"id": "mock", "object": "model"}
        if "names_context" in self.flags:
            model["max_model_len"] = CONTEXT
        return web.json_response({"object": "list", "data": [model]})

    async def metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            text=f'vllm:num_requests_running{{model_name="mock"}} {self.running + self.stuck}\n'
            f'vllm:num_requests_waiting{{model_name="mock"}} 0\nvllm:num_preemptions_total {self.preemptions}\n'
            f'vllm:kv_cache_usage_perc{{model_name="mock"}} {0.01 * self.kept + self.full}\n'
        )

    @property
    def full(self) -> float:
        return min(1.0, self.running / PLACES) if "preempts" in self.flags else 0.0

    # ------------------------------------------------------------------------------------------------- the model

    def tokens(self, prompt: str, asked: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, float]]]]:
        """(token, [(token, logprob), …] best first) without end."""
        history = prompt
        temperature = 0 if "ignores_temperature" in self.flags else asked.get("temperature", 1)
        seed = asked.get("seed") if "ignores_seed" not in self.flags else None
        draw = random.Random(None if seed is None else f"{seed}/{prompt}")
        while True:
            key = hashlib.sha256(history.encode(errors="replace")).digest()
            scores = [byte / 40 for byte in key[: len(WORDS)]]
            total = math.log(sum(math.exp(s) for s in scores))
            ranked = sorted(((w, s - total) for w, s in zip(WORDS, scores, strict=True)), key=lambda r: -r[1])
            if temperature:
                weights = [math.exp(p / temperature) for _, p in ranked]
                chosen = draw.choices(ranked, weights)[0]
            else:
                chosen = ranked[1 if "batch_dependent" in self.flags and self.running > 1 else 0]
            yield chosen[0], [chosen, *(r for r in ranked[:2] if r != chosen)]
            history += chosen[0]

    def prompt_of(self, asked: dict[str, Any], chat: bool) -> str:
        if not chat:
            return str(asked["prompt"])
        messages = asked["messages"][-1:] if "history_ignored" in self.flags else asked["messages"]
        text = ""
        for message in messages:
            content = message["content"]
            for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
                if part["type"] == "image_url":
                    self.first_image = self.first_image or part["image_url"]["url"]
                    url = self.first_image if "stale_image" in self.flags else part["image_url"]["url"]
                    text += hashlib.sha256(url.encode()).hexdigest()
                else:
                    text += part["text"]
            text += f"<{message['role']}>"
        return text + ("" if "ignores_tools" in self.flags else json.dumps(asked.get("tools") or ""))

    def bad(self, asked: dict[str, Any], chat: bool) -> str:
        if asked.get("model") != "mock":
            return "there is no such model"
        if ("messages" if chat else "prompt") not in asked:
            return "no prompt"
        prompt = self.prompt_of(asked, chat) if self.flags & {"short_context", "names_context"} else ""
        if len(prompt.encode()) + asked.get("max_tokens", 16) > CONTEXT and "image_url" not in str(asked):
            return "longer than the context"
        if asked.get("temperature", 1) < 0 or asked.get("max_tokens", 16) < 1:
            return "out of range"
        return ""

    def generate(self, prompt: str, asked: dict[str, Any]) -> tuple[list[tuple[str, list]], str, str]:
        """(tokens with alternatives, the text that is shown, finish reason)."""
        most = 20 if "ignores_max_tokens" in self.flags else asked.get("max_tokens", 16)
        stops = [] if "ignores_stop" in self.flags else asked.get("stop") or []
        rows: list[tuple[str, list]] = []
        text = ""
        code = self.code(prompt)
        if code:
            return [(code, [(code, -0.01), (" x", -5.0)])], code, "stop"
        off = 0.0
        if len(prompt) > 400:
            seen, busy = prompt in self.seen, self.running > 1
            self.seen.add(prompt)
            differs = ("warm_prefix_differs" in self.flags and seen and not busy) or (
                "surge_differs" in self.flags and busy
            )
            off = -2.0 * differs
        for token, ranked in self.tokens(prompt, asked):
            rows.append((token, [(word, value + off) for word, value in ranked]))
            text += token
            cut = min((text.find(s) for s in stops if s in text), default=-1)
            if cut >= 0:
                return rows, text[:cut], "stop"
            if len(rows) >= most:
                return rows, text, "stop" if "wrong_finish" in self.flags else "length"
        raise AssertionError("the model never ends by itself")

    def code(self, prompt: str) -> str:
        """The access code that is asked for, "" when none is, or when it is forgotten."""
        asked = re.search(r"What is the access code of (\w+)\?", prompt)
        hidden = asked and re.search(rf"The access code of {asked[1]} is (\d+)\.", prompt)
        if not hidden:
            return ""
        place = hidden.start() / len(prompt)
        return "" if "forgets_the_middle" in self.flags and 0.2 < place < 0.8 and len(prompt) > 1000 else hidden[1]

    # ---------------------------------------------------------------------------------------------------- HTTP

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        chat = request.path.endswith("chat/completions")
        if self.stumbled:
            return web.json_response({"error": {"message": "looks after itself"}}, status=503)
        if self.is_starting or ("slow_start" in self.flags and self.requests <= 6):
            return web.json_response({"error": {"message": "loading the model"}}, status=503)
        if "dead" in self.flags or self.hung or "mute" in self.flags:
            await asyncio.sleep(3600)
        if "late_first" in self.flags and self.requests <= 3:
            await asyncio.sleep(0.8)
        try:
            asked = json.loads(await request.text())
        except ValueError:
            return self.refuse("no JSON")
        why = self.bad(asked, chat)
        if why and "crashes_on_bad" in self.flags:
            return web.json_response({"error": {"message": "internal"}}, status=500)
        if chat and asked.get("tools") and "refuses_tools" in self.flags:
            return self.refuse("this endpoint has no tools")
        if why and not ("accepts_bad" in self.flags and "prompt" not in why):
            return self.refuse(why)
        if "html" in self.flags:
            return web.Response(text="<html>welcome</html>", content_type="text/html")
        self.running += 1
        self.preemptions += self.running > PLACES
        try:
            await asyncio.sleep(0.04 if "preempts" in self.flags else 0.002)
            return await self.speak(request, asked, chat)
        except (ConnectionResetError, asyncio.CancelledError) as gone:
            self.left += 1
            self.hung = "hangs_after_cancel" in self.flags
            self.stuck += "leaks_slots" in self.flags
            self.kept += "leaks_cache" in self.flags
            if isinstance(gone, ConnectionResetError):
                return web.Response()
            raise
        finally:
            self.running -= 1

    @staticmethod
    def refuse(why: str) -> web.Response:
        return web.json_response({"error": {"message": why, "type": "invalid_request_error"}}, status=400)

    async def speak(self, request: web.Request, asked: dict[str, Any], chat: bool) -> web.StreamResponse:
        prompt = self.prompt_of(asked, chat)
        if "unlike" in self.flags:
            prompt += str(random.random())
        rows, text, finish = self.generate(prompt, asked)
        if "leaks" in self.flags and "password is " in prompt:
            self.passwords.append(prompt.split("password is ")[1][:12])
            if self.running > 1:
                text += f" {self.passwords[-2]}"
        usage = {"prompt_tokens": self.prompt_tokens(asked, prompt), "completion_tokens": len(rows)}
        if "wrong_usage" in self.flags:
            usage["completion_tokens"] += 3
        usage["total_tokens"] = sum(usage.values())
        if chat and asked.get("tools") and "ignores_tools" not in self.flags:
            return await self.call(request, asked, usage)
        if asked.get("stream"):
            if "shows_the_stop" in self.flags and asked.get("stop"):
                text += asked["stop"][0][:1]  # handed out before it was known to be one
            return await self.stream(request, asked, chat, rows, text, finish, usage)
        if asked.get("echo") and not chat and "ignores_echo" not in self.flags:
            text = prompt + text
        count = 1 if "ignores_n" in self.flags else asked.get("n", 1)
        choices = [self.choice(i, asked, chat, text, rows, finish) for i in range(count)]
        body: dict[str, Any] = {"id": "x", "object": "chat.completion", "model": "mock", "choices": choices}
        return web.json_response(body | {"usage": usage})

    async def call(self, request: web.Request, asked: dict[str, Any], usage: dict[str, int]) -> web.StreamResponse:
        """Two calls of the first two tools, each in three pieces when streamed."""
        names = [tool["function"]["name"] for tool in asked["tools"][:2]]
        end = "" if "broken_arguments" in self.flags else "}"
        given = [(name, ['{"city": "Mün', 'chen", "da', 'ys": 3' + end]) for name in names]
        if not asked.get("stream"):
            functions = [{"name": n, "arguments": "".join(parts)} for n, parts in given]
            calls = [{"id": f"c{i}", "type": "function", "function": f} for i, f in enumerate(functions)]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
            return web.json_response({"id": "x", "model": "mock", "choices": [choice], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i, (name, parts) in enumerate(given[: 1 if "drops_calls" in self.flags else 2]):
            for j, part in enumerate(parts):
                function = {"arguments": part} | ({"name": name} if j == 0 else {})
                delta = {"tool_calls": [{"index": i, "function": function}]}
                await self.send(response, [{"choices": [{"index": 0, "delta": delta}]}])
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
        await self.send(response, [last, {"choices": [], "usage": usage}])
        await response.write(b"data: [DONE]\n\n")
        return response

    def prompt_tokens(self, asked: dict[str, Any], prompt: str) -> int:
        ids = asked.get("prompt")
        count = len(ids) if isinstance(ids, list) else len(prompt.encode())
        return count // 2 if "wrong_prompt_usage" in self.flags else count

    def choice(self, index: int, asked: dict, chat: bool, text: str, rows: list, finish: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {"index": index, "finish_reason": finish}
        found |= {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return found | {"logprobs": self.logprobs(asked, chat, rows)}

    def logprobs(self, asked: dict[str, Any], chat: bool, rows: list) -> Any:
        if not asked.get("logprobs") or "ignores_logprobs" in self.flags:
            return None
        off = -2.0 if "wrong_logprobs" in self.flags and self.running > 1 else 0.0
        rows = [(token, [(w, p + off) for w, p in ranked]) for token, ranked in rows]
        if "impossible_logprobs" in self.flags and self.running > 1:
            rows = [(token, [(ranked[0][0], -9999.0), *ranked[1:]]) for token, ranked in rows]
        if not chat:
            return {
                "tokens": [t for t, _ in rows],
                "token_logprobs": [r[0][1] for _, r in rows],
                "top_logprobs": [dict(r) for _, r in rows],
            }
        return {
            "content": [
                {
                    "token": t,
                    "logprob": r[0][1],
                    "bytes": list(t.encode()),
                    "top_logprobs": [{"token": w, "logprob": p} for w, p in r],
                }
                for t, r in rows
            ]
        }

    async def stream(self, request, asked, chat, rows, text, finish, usage) -> web.StreamResponse:  # type: ignore[no-untyped-def]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if "error_after_200" in self.flags:
            await self.send(response, [{"error": {"message": "out of vocabulary", "code": 400}}])
            await response.write(b"data: [DONE]\n\n")
            return response
        events = self.events(asked, chat, rows, text, finish)
        if "bunched" in self.flags:
            await asyncio.sleep(0.12)
        for number, event in enumerate(events):
            if number == 3 and "stall" in self.flags:
                await asyncio.sleep(3600)
            if number == 3 and "drop" in self.flags:
                request.transport.abort()
                return response
            if number == 3 and "truncate" in self.flags:
                return response
            if number == 3 and "garbage" in self.flags:
                await response.write(b'data: {"choices": [\n\n')
            if self.delay_s or self.flags & {"slow", "late"}:
                await asyncio.sleep(0.2 if "late" in self.flags else self.delay_s or 0.001)
            await self.send(response, [event])
            await asyncio.sleep(0)
        if (asked.get("stream_options") or {}).get("include_usage") and "no_usage" not in self.flags:
            await self.send(response, [{"choices": [], "usage": usage}])
        if "merged_events" in self.flags:
            await response.write(b"\n\n")
        if "no_done" not in self.flags:
            await response.write(b"data: [DONE]\n\n")
        if "keeps_open" in self.flags:
            await asyncio.sleep(2)
        return response

    def events(self, asked, chat, rows, text, finish) -> list[dict[str, Any]]:  # type: ignore[no-untyped-def]
        """The chunks of a stream; the shown text is cut along the tokens."""
        parts, rest = [], text
        for number, (token, ranked) in enumerate(rows):
            last = number == len(rows) - 1
            shown, rest = (rest, "") if last else (rest[: len(token)], rest[len(token) :])
            parts.append((shown, [(token, ranked)]))
        if "cut_characters" in self.flags:
            raw = [(bytes([b]).decode(errors="replace"), r) for s, r in parts[:6] for b in s.encode()]
            parts = raw + parts[6:]
        if "lost_chunk" in self.flags:
            del parts[2]
        if "doubled_chunk" in self.flags:
            parts.insert(2, parts[2])
        if "reordered" in self.flags:
            parts[1], parts[2] = parts[2], parts[1]
        if "merged" in self.flags:
            parts = [
                (a[0] + "".join(s for s, _ in b), a[1] + [r for _, rs in b for r in rs]) for a, *b in _pairs(parts)
            ]
        if "zero_chunks" in self.flags:
            return []
        events = [self.event(asked, chat, shown, found, None) for shown, found in parts if shown]
        if chat:
            events.insert(0, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        return [*events, self.event(asked, chat, "", [], finish)]

    def event(self, asked, chat, text, rows, finish) -> dict[str, Any]:  # type: ignore[no-untyped-def]
        found: dict[str, Any] = {"index": 0, "finish_reason": finish}
        found |= {"delta": {"content": text} if text else {}} if chat else {"text": text}
        if rows and asked.get("logprobs"):
            found["logprobs"] = self.logprobs(asked, chat, rows)
        return {"id": "x", "object": "chat.completion.chunk", "choices": [found]}

    async def send(self, response: web.StreamResponse, events: list[dict[str, Any]]) -> None:
        data = b"".join(f"data: {json.dumps(e, ensure_ascii=False)}\n\n".encode() for e in events)
        if "merged_events" in self.flags:
            data = data.replace(b"\n\n", b"")  # the next event goes on in the same line
        if "split" not in self.flags:
            await response.write(data)
            return
        for start in range(0, len(data), 7):
            await response.write(data[start : start + 7])
            await asyncio.sleep(0)


def _pairs(rows: list) -> list[list]:
    return [rows[i : i + 2] for i in range(0, len(rows), 2)]


@contextlib.contextmanager
def serving(endpoint: Endpoint) -> Iterator[str]:
    """Runs the endpoint in a thread of its own; gives its address."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(endpoint.app(), handler_cancellation=True, shutdown_timeout=0.1)
    ready = threading.Event()
    address: list[str] = []

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        address.append(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}")
        ready.set()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield address[0]
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
