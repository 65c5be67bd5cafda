"""What is asked of an endpoint, in order. Every exchange is kept under its label; nothing is judged here.

Labels: `plain`, `stop`, `seed/7/0` … (parameters), `bad/…` (values that must be refused), `whole/i`, `stream/i` (the
same prompt both ways), `turns/…`, `image/…`, `count/…`, `alone/i`, `again/i`, `together/r/i`, `long/j`, `cancel/j`,
`after_cancel/i`.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from typing import Any

from day0check.errors import UsageError
from day0check.load import asks
from day0check.load.asks import CHAT, COMPLETIONS, Dialect
from day0check.load.client import Client
from day0check.load.counters import read_counters
from day0check.load.prompts import MULTIBYTE, canary, unique
from day0check.load.records import Answer, Counters, Exchange, Reply

PARTS = ("parameters", "wire", "tools", "interference", "speed")
FAULTS_IN_A_ROW = 3  # after so many requests without an answer the endpoint is left alone
FAULTY = ("refused", "stalled", "late", "dropped")
SETTLE_S = 5.0
PLAIN_TOKENS = 16
FEWEST_FOR_SURGE = 8  # requests at once; fewer cannot fill a cache
PREFIX_WORDS, SURGE_WORDS = 160, 96
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
        self._faults = 0

    async def __call__(
        self, label: str, body: Any, *, path: str | None = None, cut_after: int | None = None
    ) -> Exchange:
        """Raises GivenUp when this was one unanswered request too many."""
        path = path or self.dialect.path
        exchange = await self.client.ask(label, path, body, cut_after=cut_after)
        if exchange.reply.fault == "unsent":
            raise GivenUp(exchange.reply.detail)
        self.exchanges.append(exchange)
        self._faults = self._faults + 1 if exchange.reply.fault in FAULTY else 0
        if self._faults >= FAULTS_IN_A_ROW:
            raise GivenUp(f"{self._faults} requests in a row got no answer ({exchange.reply.fault})")
        return exchange

    async def at_once(self, jobs: dict[str, Any], *, path: str | None = None) -> None:
        """Sends all labelled bodies at the same time; gives up only when none was answered."""
        path = path or self.dialect.path
        given = await asyncio.gather(*(self.client.ask(label, path, body) for label, body in jobs.items()))
        sent = [e for e in given if e.reply.fault != "unsent"]
        self.exchanges += sent
        if len(sent) < len(given):
            raise GivenUp("the bounds of this run were reached")
        if all(e.reply.fault in FAULTY for e in given):
            raise GivenUp(f"none of {len(given)} requests sent at once was answered ({given[0].reply.fault})")

    async def count(self, label: str) -> Counters:
        counters = Counters(label, await read_counters(self.client))
        self.counters.append(counters)
        return counters


async def discover(asker: Asker) -> None:
    """Finds the served model and the API that works. Raises UsageError when nobody is there, GivenUp when nobody
    answers as an endpoint should."""
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
    if model is None:
        raise GivenUp("it lists no model under /v1/models; name one with --model")
    prompt = unique(0, seed=asker.wish.seed, words=asker.wish.words)
    good: dict[str, bool] = {}
    for api, path in (("chat", CHAT), ("completions", COMPLETIONS)):
        dialect = Dialect(api, model)
        answers = [
            await asker(f"hello/{api}{'_stream' * s}", asks.ask(dialect, prompt, max_tokens=4, stream=s), path=path)
            for s in (False, True)
        ]
        good[api] = all(e.good for e in answers)
    api = next((a for a in ("chat", "completions") if good[a]), None)
    if api is None:
        raise GivenUp("neither chat completions nor completions answer, streamed and whole")
    asker.dialect = Dialect(api, model)
    probe = await asker("logprobs", asks.ask(asker.dialect, prompt, max_tokens=4) | asks.with_logprobs(api))
    asker.dialect = replace(asker.dialect, logprobs=probe.good and probe.answer.logprobs is not None)


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


# ---------------------------------------------------------------------------------------------------- interference


async def interference(asker: Asker) -> None:
    """Prompts with a canary each: alone, alone again, all at once, at once beside long prompts; then clients leave."""
    d, wish = asker.dialect, asker.wish
    bodies = [_with_canary(asker, i) for i in range(wish.together)]
    await asker.count("before_alone")
    for again in ("alone", "again"):
        for i, body in enumerate(bodies):
            await asker(f"{again}/{i}", body)
    await asker.count("before_together")
    await asker.at_once({f"together/0/{i}": body for i, body in enumerate(bodies)})
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    jobs = {f"together/1/{i}": body | streamed for i, body in enumerate(bodies)}
    for j in range(2):
        long = unique(40 + j, seed=wish.seed, words=8 * wish.words)
        jobs[f"long/{j}"] = asks.ask(d, long, max_tokens=4)
    await asker.at_once(jobs)
    if d.logprobs:
        await asker.at_once({f"together/2/{i}": _other_options(body, d, i) for i, body in enumerate(bodies)})
    await asker.count("after_together")
    if wish.together >= FEWEST_FOR_SURGE:
        await _prefix(asker)
        await _surge(asker)
    await _cancel(asker, bodies)


async def _prefix(asker: Asker) -> None:
    """A long prompt cold, and warm: the second time its prefix may lie in a cache."""
    for i in range(2):
        prompt = unique(50 + i, seed=asker.wish.seed, words=PREFIX_WORDS)
        body = asks.ask(asker.dialect, prompt, max_tokens=asker.wish.tokens)
        await asker.count(f"before_warm/{i}")
        for warmth in ("cold", "warm"):
            await asker(f"prefix/{warmth}/{i}", body)
            if warmth == "cold":
                await asker.count(f"between_warm/{i}")
        await asker.count(f"after_warm/{i}")


async def _surge(asker: Asker) -> None:
    """Long prompts with long answers alone, then with many of their kind at once: memory may run short."""
    words, tokens = SURGE_WORDS, 2 * asker.wish.tokens
    bodies = [
        asks.ask(asker.dialect, unique(60 + i, seed=asker.wish.seed, words=words), max_tokens=tokens)
        for i in range(2 * asker.wish.together)
    ]
    for i in range(2):
        await asker(f"surge/alone/{i}", bodies[i])
    await asker.count("before_surge")
    await asker.at_once({f"surge/together/{i}": body for i, body in enumerate(bodies)})
    await asker.count("after_surge")


def _with_canary(asker: Asker, number: int) -> dict[str, Any]:
    seed = asker.wish.seed
    prompt = f"{unique(30 + number, seed=seed, words=asker.wish.words)} The password is {canary(number, seed=seed)}."
    return asks.ask(asker.dialect, prompt, max_tokens=asker.wish.tokens)


def _other_options(body: dict[str, Any], dialect: Dialect, number: int) -> dict[str, Any]:
    """The same request with other wishes about log-probabilities than its neighbours have: none, more, the same."""
    field = "top_logprobs" if dialect.api == "chat" else "logprobs"
    if number % 3 == 1:
        return {k: v for k, v in body.items() if k not in ("logprobs", "top_logprobs")}
    return body | {field: 5} if number % 3 == 2 else body


async def _cancel(asker: Asker, bodies: list[dict[str, Any]]) -> None:
    """Clients that leave inside an answer, together, twice; then the same prompts must be answered as before.

    Twice, since what an endpoint keeps on purpose (prefixes of prompts) it keeps once, and a leak grows."""
    usage: float | None = None
    for again in range(2):
        jobs = {
            f"cancel/{again}{j}": body | {"stream": True, "max_tokens": 2 * asker.wish.tokens}
            for j, body in enumerate(bodies[:4])
        }
        left = await asyncio.gather(
            *(asker.client.ask(label, asker.dialect.path, body, cut_after=3) for label, body in jobs.items())
        )
        asker.exchanges += left
        counters = await settled(asker, f"after_cancel/{again}", usage)
        usage = counters.values.get("kv_usage")
    after = [await asker(f"after_cancel/{i}", body) for i, body in enumerate(bodies[:2])]
    if all(e.reply.fault in FAULTY for e in after):
        raise GivenUp(f"no request is answered since clients left ({after[0].reply.fault})")


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
