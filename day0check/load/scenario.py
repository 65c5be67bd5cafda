"""What is asked of an endpoint, in order. Every exchange is kept under its label; nothing is judged here.

Labels: `plain`, `stop`, `seed/7/0` … (parameters), `bad/…` (values that must be refused), `whole/i`, `stream/i` (the
same prompt both ways), `turns/…`, `image/…`, `count/…`; those of interference stand in `load/interference.py`.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import dataclass, replace
from typing import Any

from day0check.errors import UsageError
from day0check.load import asks
from day0check.load.asks import CHAT, COMPLETIONS, Dialect
from day0check.load.client import Client
from day0check.load.counters import read_counters, watch_counters
from day0check.load.prompts import MULTIBYTE, unique
from day0check.load.records import Answer, Counters, Exchange, Reply

PARTS = ("parameters", "wire", "tools", "interference", "speed")
FAULTS_IN_A_ROW = 3  # after so many requests without an answer the endpoint is left alone
FAULTY = ("refused", "silent", "stalled", "late", "dropped")
SETTLE_S = 5.0
START_S = 120.0  # a server that is loading says so under /health
RECOVER_S = 20.0  # and one that looks after itself, having refused a request
FIRST_LOOK_S, RAREST_LOOK_S = 0.1, 2.0  # between two looks, each twice the one before, where it does not say when
PLAIN_TOKENS = 16
TOKEN_IDS = (65, 98, 99, 66, 100, 101, 67, 102, 103, 68, 104, 105, 69)  # in the vocabulary of any model


@dataclass(frozen=True)
class Wish:
    """What to ask: `model` None takes the endpoint's first; `together` prompts are sent alone and at once; `followed`:
    prompts of token ids for the reference; `tokens`: of each answer that is compared; `soak`: requests of that part;
    `contexts`: lengths in tokens in which needles are hidden; `ends`: tokens that end an answer, as the model's files
    say."""

    model: str | None = None
    parts: tuple[str, ...] = PARTS
    seed: int = 0
    together: int = 8
    words: int = 16
    followed: tuple[tuple[int, ...], ...] = ()
    tokens: int = 24
    soak: int = 0
    contexts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


class GivenUp(Exception):
    """The endpoint stopped answering, or the bounds of the run are used up; the text says which."""


class Asker:
    """Sends labelled requests and keeps what came back."""

    def __init__(self, client: Client, wish: Wish) -> None:
        self.client, self.wish = client, wish
        self.exchanges: list[Exchange] = []
        self.counters: list[Counters] = []
        self.dialect: Dialect | None = None
        self.context: int | None = None  # positions of a request, where the endpoint names them
        self.tokens_per_word = 6.0  # of our prompts; many where tokens are bytes
        self._faults = 0

    async def __call__(
        self,
        label: str,
        body: Any,
        *,
        path: str | None = None,
        cut_after: int | None = None,
        limit_s: float = math.inf,
    ) -> Exchange:
        """Raises GivenUp when this was one unanswered request too many, or the endpoint is not ready any more."""
        path = path or self.dialect.path
        exchange = await self.client.ask(label, path, body, cut_after=cut_after, limit_s=limit_s)
        if exchange.reply.fault == "unsent":
            raise GivenUp(exchange.reply.detail)
        self.exchanges.append(exchange)
        self._faults = self._faults + 1 if exchange.reply.fault in FAULTY else 0
        if self._faults >= FAULTS_IN_A_ROW:
            raise GivenUp(f"{self._faults} requests in a row got no answer ({exchange.reply.fault})")
        await self._until_ready_again([exchange])
        return exchange

    async def _until_ready_again(self, exchanges: list[Exchange]) -> None:
        """Where one of these was refused with 503 by an endpoint that says under /health that it is not ready, waits
        until it is: the questions that are left are not spent on it. Raises GivenUp when it goes on so."""
        refused = any(e.reply.status == 503 for e in exchanges)
        if refused and await health_within(self.client, RECOVER_S) is None:
            raise GivenUp(f"/health has been answering 503 for {RECOVER_S:.0f} s after a request was refused so")

    async def at_once(
        self,
        jobs: dict[str, Any],
        *,
        path: str | None = None,
        injected: dict[str, Any] | None = None,
        peak: str | None = None,
        patience_s: float = 0.0,
    ) -> None:
        """Sends all labelled bodies at the same time; gives up only when none was answered.

        `injected`: bodies that are sent when half of the others have begun to answer. `peak`: the label under which the
        most that the endpoint's counters showed meanwhile is kept. `patience_s`: how long each may take, where that is
        more than the limits of the run say.
        """
        path, injected = path or self.dialect.path, injected or {}
        began = {label: asyncio.Event() for label in jobs}

        async def inject(label: str, body: Any) -> Exchange:
            await half_of(began)
            return await self.client.ask(label, path, body)

        tasks = [
            *(
                asyncio.create_task(self.client.ask(n, path, b, began=began[n], patience_s=patience_s))
                for n, b in jobs.items()
            ),
            *(asyncio.create_task(inject(n, b)) for n, b in injected.items()),
        ]
        peaks: dict[str, float] = {}
        watch = asyncio.create_task(watch_counters(self.client, peaks)) if peak else None
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in [*tasks, watch]:
                if task is not None:
                    task.cancel()
            await asyncio.gather(*(t for t in (*tasks, watch) if t is not None), return_exceptions=True)
            given = [t.result() for t in tasks if not t.cancelled() and t.exception() is None]
            self.exchanges += [e for e in given if e.reply.fault != "unsent"]
            if peak:
                self.counters.append(Counters(peak, peaks))
        if any(e.reply.fault == "unsent" for e in given):
            raise GivenUp("the bounds of this run were reached")
        if all(e.reply.fault in FAULTY for e in given):
            raise GivenUp(f"none of {len(given)} requests sent at once was answered ({given[0].reply.fault})")
        await self._until_ready_again(given)

    def peak(self, label: str) -> dict[str, float]:
        """The most that the endpoint's counters showed under that label."""
        return next((c.values for c in reversed(self.counters) if c.label == label), {})

    async def count(self, label: str) -> Counters:
        counters = Counters(label, await read_counters(self.client))
        self.counters.append(counters)
        return counters


async def half_of(events: dict[str, asyncio.Event]) -> None:
    """Waits until half of the events, rounded up, have happened."""
    waiting = {asyncio.create_task(event.wait()) for event in events.values()}
    most_open = len(waiting) // 2
    try:
        while len(waiting) > most_open:
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()


async def health_within(client: Client, seconds: float) -> Reply | None:
    """The first reply under /health that is not 503, None where there is none for `seconds`. Looks again when the
    endpoint says (Retry-After), or else more and more rarely."""
    end, pause_s = time.monotonic() + seconds, FIRST_LOOK_S
    while (health := await client.get("/health")).status == 503:
        left_s = end - time.monotonic()
        if left_s <= 0:
            return None
        asked_s = pause_s if health.retry_after_s is None else health.retry_after_s
        await asyncio.sleep(min(max(asked_s, FIRST_LOOK_S), left_s))
        pause_s = min(2 * pause_s, RAREST_LOOK_S)
    return health


async def until_started(asker: Asker) -> None:
    """Waits for an endpoint that says of itself that it is not ready yet. Raises UsageError when it goes on so."""
    health = await health_within(asker.client, START_S)
    if health is None:
        raise UsageError(
            f"/health has been answering 503 for {START_S:.0f} s: it is not ready yet",
            where=asker.client.target.base,
            todo="wait until the server has started, or look into its log",
        )
    if health.fault == "unsent":
        raise GivenUp("the bounds of this run were reached while the endpoint started")


async def discover(asker: Asker) -> None:
    """Finds the served model and the API that works. Raises UsageError when nobody is there, GivenUp when nobody
    answers as an endpoint should."""
    await until_started(asker)
    listed = await asker.client.get("/v1/models")
    if listed.fault == "refused":
        raise UsageError(
            f"nothing answers: {listed.detail}",
            where=asker.client.target.base,
            todo="start the server, or correct --url",
        )
    asker.exchanges.append(model_list(listed))
    model = asker.wish.model or first_model(asker.exchanges[-1].asked)
    if listed.status in (401, 403):
        raise UsageError(
            f"the endpoint wants a key (HTTP {listed.status})",
            where=asker.client.target.base,
            todo="name the variable that holds it with --api-key-env",
        )
    if 300 <= listed.status < 400:
        raise UsageError(
            f"the address answers with {listed.detail} (HTTP {listed.status}); redirects are not followed",
            where=asker.client.target.base,
            todo="give the address behind it as --url",
        )
    if model is None:
        how = "lists no model" if listed.status == 200 else f"answers {listed.fault or f'HTTP {listed.status}'}"
        hint = "; name the model with --model" if listed.status in (200, 404) else ""
        raise GivenUp(f"/v1/models {how}{hint}")
    prompt = unique(0, seed=asker.wish.seed, words=asker.wish.words)
    good: dict[str, bool] = {}
    for api, path in (("chat", CHAT), ("completions", COMPLETIONS)):
        dialect = Dialect(api, model)
        answers = [
            await asker(f"hello/{api}{'_stream' * s}", asks.ask(dialect, prompt, max_tokens=4, stream=s), path=path)
            for s in (False, True)
        ]
        good[api] = all(e.good for e in answers)
    _learn(asker, model)
    api = next((a for a in ("chat", "completions") if good[a]), None)
    if api is None:
        raise GivenUp("neither chat completions nor completions answer, streamed and whole")
    asker.dialect = Dialect(api, model)
    probe = await asker("logprobs", asks.ask(asker.dialect, prompt, max_tokens=4) | asks.with_logprobs(api))
    asker.dialect = replace(asker.dialect, logprobs=probe.good and probe.answer.logprobs is not None)


def _learn(asker: Asker, model: str) -> None:
    """How long a request may be, and how many tokens a word of our prompts has, as far as the endpoint says so."""
    models = asker.exchanges[0].asked.get("data")
    entries = [m for m in models if isinstance(m, dict)] if isinstance(models, list) else []
    named = next((m.get("max_model_len") for m in entries if m.get("id") == model), None)
    asker.context = named if isinstance(named, int) and named > 0 else None
    counts = [e.answer.usage.prompt_tokens for e in asker.exchanges if e.good and e.answer.usage is not None]
    if counts:
        asker.tokens_per_word = max(0.25, max(counts) / asker.wish.words)


def model_list(listed: Reply) -> Exchange:
    """/v1/models as an exchange; `asked` holds what it lists."""
    try:
        data = json.loads(listed.body)
    except ValueError:
        data = {}
    return Exchange("models", "/v1/models", data if isinstance(data, dict) else {}, listed, Answer())


def first_model(data: dict[str, Any]) -> str | None:
    models = data.get("data")
    first = models[0] if isinstance(models, list) and models else None
    name = first.get("id") if isinstance(first, dict) else None
    return name if isinstance(name, str) else None


# ------------------------------------------------------------------------------------------------------ parameters


async def parameters(asker: Asker) -> None:
    """Each parameter with a value whose effect shows, and values that must be refused."""
    d, prompt = asker.dialect, unique(1, seed=asker.wish.seed, words=asker.wish.words)

    def body(**fields: Any) -> dict[str, Any]:
        return asks.ask(d, prompt, max_tokens=PLAIN_TOKENS) | fields

    plain = await asker("plain", body())
    await asker("plain_stream", asks.ask(d, prompt, max_tokens=PLAIN_TOKENS, stream=True))
    await asker("max_tokens", body(max_tokens=3))
    for i in range(3):
        await asker(f"temperature/{i}", body(temperature=1.0))
    for seed, again in ((7, 0), (7, 1), (8, 0)):
        await asker(f"seed/{seed}/{again}", body(temperature=1.0, seed=seed))
    await asker("n", body(temperature=1.0, n=2))
    stop = stop_from(plain.answer.text)
    if plain.good and stop:
        await asker("stop", body(stop=[stop]))
        await asker("stop_stream", body(stop=[stop], stream=True, stream_options={"include_usage": True}))
    await asker("ignore_eos", body(ignore_eos=True))
    await asker("return_token_ids", body(return_token_ids=True))
    await asker("prompt_logprobs", body(prompt_logprobs=1))
    if any(e.label == "hello/completions" and e.good for e in asker.exchanges):
        await _completions(asker, prompt)
    await _bad_values(asker, body)


async def _completions(asker: Asker, prompt: str) -> None:
    """Echo and token-id prompts exist in completions only."""
    model = asker.dialect.model
    common = {"model": model, "temperature": 0, "max_tokens": 1}
    await asker("echo", common | {"prompt": prompt, "echo": True}, path=COMPLETIONS)
    for label, ids in (("token_ids", TOKEN_IDS[:8]), ("token_ids_longer", TOKEN_IDS)):
        await asker(label, common | {"prompt": list(ids)}, path=COMPLETIONS)


async def _bad_values(asker: Asker, body: Any) -> None:
    await asker("bad/temperature", body(temperature=-3))
    await asker("bad/max_tokens", body(max_tokens=-1))
    await asker("bad/model", body(model="day0check-no-such-model"))
    missing = body()
    del missing["messages" if asker.dialect.api == "chat" else "prompt"]
    await asker("bad/prompt", missing)
    await asker("bad/json", b'{"model": ')


def stop_from(text: str) -> str:
    """Two characters from inside `text` (or one), visible and whole, to stop at; "" when it has none."""
    for width in (2, 1):
        for start in range(max(1, len(text) // 3), len(text) - width):
            part = text[start : start + width]
            if part.isprintable() and "\ufffd" not in part and part.strip() == part and text.find(part) > 0:
                return part
    return ""


# ------------------------------------------------------------------------------------------------------------ wire


async def wire(asker: Asker) -> None:
    """The same prompts whole and streamed, twice each; turns; images."""
    d, wish = asker.dialect, asker.wish
    prompts = (*(unique(10 + i, seed=wish.seed, words=wish.words) for i in range(2)), *MULTIBYTE)
    for i, prompt in enumerate(prompts):
        for again in ("", "_again"):
            await asker(f"whole{again}/{i}", asks.ask(d, prompt, max_tokens=PLAIN_TOKENS))
            await asker(f"stream{again}/{i}", asks.ask(d, prompt, max_tokens=PLAIN_TOKENS, stream=True))
    if d.api == "chat":
        await _turns(asker)
        await _images(asker)


async def _turns(asker: Asker) -> None:
    """The same last turn after two histories that differ in the first."""
    seed, words = asker.wish.seed, asker.wish.words
    last = "Say what I said first, and nothing else."
    for label, first in (("a", 20), ("b", 21), ("a_again", 20)):
        turns = (unique(first, seed=seed, words=words), "I see.", last)
        await asker(f"turns/{label}", asks.conversation(asker.dialect, turns, max_tokens=PLAIN_TOKENS))


async def _images(asker: Asker) -> None:
    """One text about two images of one size, and the first again."""
    for label, seed in (("a", 1), ("b", 2), ("a_again", 1)):
        body = asks.about_image(asker.dialect, "Which colours?", asks.picture(seed), max_tokens=PLAIN_TOKENS)
        shown = await asker(f"image/{label}", body)
        if not shown.good:
            return


async def follow(asker: Asker) -> None:
    """Greedy answers to prompts of token ids, with the ids of the answers in either way that endpoints know."""
    common = {"model": asker.dialect.model, "temperature": 0, "max_tokens": asker.wish.tokens, "logprobs": 2}
    for i, ids in enumerate(asker.wish.followed):
        body = common | {"prompt": list(ids)}
        answer = await asker(f"follow/{i}", body | {"return_token_ids": True}, path=COMPLETIONS)
        if not answer.good or not answer.answer.token_ids:
            asker.exchanges.pop()
            await asker(f"follow/{i}", body | {"return_tokens_as_token_ids": True}, path=COMPLETIONS)


async def settled(asker: Asker, label: str, usage: float | None) -> Counters:
    """The counters when nothing runs and the cache holds no more than `usage`, or after SETTLE_S seconds."""
    end = asyncio.get_running_loop().time() + SETTLE_S
    while True:
        counters = Counters(label, await read_counters(asker.client))
        busy = counters.values.get("running", 0) + counters.values.get("waiting", 0)
        more = usage is not None and counters.values.get("kv_usage", 0.0) > usage
        if not counters.values or not (busy or more) or asyncio.get_running_loop().time() > end:
            asker.counters.append(counters)
            return counters
        await asyncio.sleep(0.2)
