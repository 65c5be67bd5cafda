"""Events of the engine as OpenAI's JSON. A whole answer is its chunks put together, so the two cannot differ."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from day0check.accelerated.server.orders import Done, Event, Order, Piece, PromptLogprobs, TokenLogprob
from day0check.accelerated.server.schema import Asked, ChatRequest, CompletionRequest
from day0check.accelerated.server.vocabulary import Vocabulary
from day0check.probe.registry import Operators

LOWEST = -9999.0  # stands for -inf, which JSON cannot say; vLLM uses the same
Json = dict[str, Any]


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int

    def json(self) -> Json:
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


class Naming:
    """How tokens and log-probabilities are written for one request."""

    def __init__(self, asked: Asked, vocabulary: Vocabulary) -> None:
        self._ids, self._words = asked.return_tokens_as_token_ids, vocabulary

    def token(self, token: int) -> str:
        return f"token_id:{token}" if self._ids else self._words.shown(token)

    def chat_entry(self, told: TokenLogprob) -> Json:
        top = [self._with_bytes(token, value) for token, value in told.top]
        return {**self._with_bytes(told.token, told.logprob), "top_logprobs": top}

    def _with_bytes(self, token: int, value: float) -> Json:
        return {"token": self.token(token), "logprob": finite(value), "bytes": list(self._words.pieces[token])}

    def table(self, told: TokenLogprob, count: int) -> dict[str, float]:
        """The `count` best tokens and the token itself."""
        best = {self.token(token): finite(value) for token, value in told.top[:count]}
        return best | {self.token(told.token): finite(told.logprob)}

    def prompt(self, logprobs: Sequence[TokenLogprob], count: int) -> list[Any]:
        """As vLLM's `prompt_logprobs`: null for the first token, then {token id: what is known of it}."""
        found: list[Any] = [None]
        for told in logprobs:
            best = [(token, value, rank) for rank, (token, value) in enumerate(told.top[:count], 1)]
            entries = [*best, (told.token, told.logprob, told.rank)]
            found.append(
                {
                    str(token): {"logprob": finite(value), "rank": rank, "decoded_token": self._words.shown(token)}
                    for token, value, rank in entries
                }
            )
        return found


def finite(value: float) -> float:
    return max(value, LOWEST)


# ------------------------------------------------------------------------------------------------- completions


class CompletionChoice:
    """One prompt's answer: `feed` events, get chunks of `choices`."""

    def __init__(self, index: int, order: Order, asked: CompletionRequest, vocabulary: Vocabulary) -> None:
        self.index, self.order, self._asked = index, order, asked
        self._words, self._naming = vocabulary, Naming(asked, vocabulary)
        self._characters = 0  # of the text so far
        self._begun = False
        self._prompt: tuple[TokenLogprob, ...] = ()
        self.completion_tokens = 0

    def feed(self, event: Event) -> list[Json]:
        if isinstance(event, PromptLogprobs):
            self._prompt = event.logprobs
            return []
        chunks = [] if self._begun else self._first()
        self._begun = True
        if isinstance(event, Piece):
            self.completion_tokens += len(event.tokens)
            logprobs = self._logprobs(event.logprobs, [self._characters] * len(event.logprobs))
            if event.text or logprobs or (self._asked.return_token_ids and event.tokens):
                chunks.append(self._chunk(event.text, logprobs, list(event.tokens)))
            self._characters += len(event.text)
        elif isinstance(event, Done):
            chunks.append(self._chunk("", None, []) | {"finish_reason": event.finish, "stop_reason": event.stop_reason})
        return chunks

    def _first(self) -> list[Json]:
        extra: Json = {}
        if self._asked.return_token_ids:
            extra["prompt_token_ids"] = list(self.order.prompt)
        if self._asked.prompt_logprobs is not None:
            extra["prompt_logprobs"] = self._naming.prompt(self._prompt, self._asked.prompt_logprobs)
        if not self._asked.echo:
            return [self._chunk("", None, []) | extra] if extra else []
        texts = texts_of(self.order.prompt, self._words)
        offsets = [0]
        for text in texts:
            offsets.append(offsets[-1] + len(text))
        self._characters = offsets[-1]
        logprobs = None
        if self._asked.logprobs is not None:
            nothing = {"tokens": [self._naming.token(self.order.prompt[0])], "token_logprobs": [None]}
            logprobs = join_logprobs(
                [
                    {**nothing, "top_logprobs": [None], "text_offset": [0]},
                    self._logprobs(self._prompt, offsets[1 : len(texts)]),
                ]
            )
        return [self._chunk("".join(texts), logprobs, []) | extra]

    def _logprobs(self, told: Sequence[TokenLogprob], offsets: Sequence[int]) -> Json | None:
        if self._asked.logprobs is None or not told:
            return None
        return {
            "tokens": [self._naming.token(t.token) for t in told],
            "token_logprobs": [finite(t.logprob) for t in told],
            "top_logprobs": [self._naming.table(t, self._asked.logprobs) for t in told],
            "text_offset": list(offsets),
        }

    def _chunk(self, text: str, logprobs: Json | None, tokens: list[int]) -> Json:
        chunk = {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}
        return chunk | ({"token_ids": tokens} if self._asked.return_token_ids else {})


def texts_of(tokens: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    """The text that each token completes; what stays incomplete goes to the last one."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(vocabulary.pieces[t], i == len(tokens) - 1) for i, t in enumerate(tokens)]


def join_logprobs(parts: Sequence[Json | None]) -> Json | None:
    """Lists of the same keys, one behind the other; None when nothing is there."""
    given = [part for part in parts if part is not None]
    return {key: [v for part in given for v in part[key]] for key in given[0]} if given else None


def join_completion(chunks: Sequence[Json]) -> Json:
    """The choice whose chunks these are."""
    whole = dict(chunks[-1])
    whole["text"] = "".join(chunk["text"] for chunk in chunks)
    whole["logprobs"] = join_logprobs([chunk["logprobs"] for chunk in chunks])
    if "token_ids" in whole:
        whole["token_ids"] = [token for chunk in chunks for token in chunk["token_ids"]]
    for key in ("prompt_token_ids", "prompt_logprobs"):
        if key in chunks[0]:
            whole[key] = chunks[0][key]
    return whole


# -------------------------------------------------------------------------------------------------------- chat


class ChatChoice:
    """The answer of a conversation: thoughts, text and tool calls apart, by the operators of the serve family."""

    index = 0

    def __init__(
        self,
        order: Order,
        asked: ChatRequest,
        vocabulary: Vocabulary,
        operators: Operators,
        schemas: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.order, self._asked, self._operators, self._schemas = order, asked, operators, schemas
        self._naming = Naming(asked, vocabulary)
        self._with_tools = bool(asked.tools) and asked.tool_choice != "none"
        self._text = self._content = ""
        self._begun = False
        self._calls = 0
        self._prompt: tuple[TokenLogprob, ...] = ()
        self.completion_tokens = 0

    def feed(self, event: Event) -> list[Json]:
        if isinstance(event, PromptLogprobs):
            self._prompt = event.logprobs
            return []
        chunks = [] if self._begun else [self._chunk({"role": "assistant", "content": ""}, [], ())]
        self._begun = True
        if isinstance(event, Piece):
            self.completion_tokens += len(event.tokens)
            told = [self._naming.chat_entry(t) for t in event.logprobs] if self._asked.logprobs else []
            delta = self._delta(event.text, final=False)
            if delta or told or (self._asked.return_token_ids and event.tokens):
                chunks.append(self._chunk(delta or {"content": ""}, told, event.tokens))
        elif isinstance(event, Done):
            delta = self._delta("", final=True)
            if delta:
                chunks.append(self._chunk(delta, [], ()))
            finish = "tool_calls" if self._calls and event.finish == "stop" else event.finish
            chunks.append(self._chunk({}, [], ()) | {"finish_reason": finish, "stop_reason": event.stop_reason})
        return chunks

    def extra(self) -> Json:
        """Keys beside `choices`, as vLLM has them."""
        found: Json = {}
        if self._asked.prompt_logprobs is not None:
            found["prompt_logprobs"] = self._naming.prompt(self._prompt, self._asked.prompt_logprobs)
        if self._asked.return_token_ids:
            found["prompt_token_ids"] = list(self.order.prompt)
        return found

    def _delta(self, text: str, *, final: bool) -> Json:
        sent, self._text = len(self._text), self._text + text
        split = self._operators.get("serve.reasoning", "serve")
        thoughts, content = split(self._text, sent=sent, final=final)
        calls: tuple[tuple[int, str, str], ...] = ()
        if self._with_tools:
            sent, self._content = len(self._content), self._content + content
            parse = self._operators.get("serve.tool_call", "serve")
            content, calls = parse(self._content, sent=sent, schemas=self._schemas, final=final)
        delta: Json = {}
        if thoughts:
            delta["reasoning_content"] = thoughts
        if content:
            delta["content"] = content
        if calls:
            delta["tool_calls"] = [self._call(*call) for call in calls]
        return delta

    def _call(self, number: int, name: str, arguments: str) -> Json:
        if number < self._calls:
            return {"index": number, "function": {"arguments": arguments}}
        self._calls = number + 1
        return {
            "index": number,
            "id": f"call_{self.order.id.rpartition('-')[2]}_{number}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }

    def _chunk(self, delta: Json, told: list[Json], tokens: Sequence[int]) -> Json:
        logprobs = {"content": told} if told else None
        chunk = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None, "stop_reason": None}
        return chunk | ({"token_ids": list(tokens)} if self._asked.return_token_ids else {})


def join_chat(chunks: Sequence[Json]) -> Json:
    """The choice with its message whose chunks these are."""
    whole = {key: value for key, value in chunks[-1].items() if key != "delta"}
    deltas = [chunk["delta"] for chunk in chunks]
    calls: dict[int, Json] = {}
    for part in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if part["index"] not in calls:
            calls[part["index"]] = {
                **{k: v for k, v in part.items() if k != "index"},
                "function": dict(part["function"]),
            }
        else:
            calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    content = "".join(delta.get("content", "") for delta in deltas)
    message: Json = {"role": "assistant", "content": content if content or not calls else None}
    thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = list(calls.values())
    told = [entry for chunk in chunks if chunk["logprobs"] for entry in chunk["logprobs"]["content"]]
    if "token_ids" in whole:
        whole["token_ids"] = [token for chunk in chunks for token in chunk["token_ids"]]
    return whole | {"message": message, "logprobs": {"content": told} if told else None}
