"""From the bytes of a reply to its content: OpenAI's completions and chat completions, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from day0check.load.records import Answer, Piece, Reply, Token, ToolCall, Usage
from day0check.load.sse import SseDecoder

DONE = "[DONE]"
_SHOWN = 200


def read_answer(reply: Reply) -> Answer:
    """The content of `reply`. Never raises: what cannot be read is named in `flaws` or `error`."""
    if reply.streamed:
        return _read_stream(reply)
    text = reply.body
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        if reply.status != 200 or reply.fault:
            return Answer(error=_shown(text.decode(errors="replace")) or reply.detail or f"HTTP {reply.status}")
        return Answer(error="the answer is no JSON", flaws=("garbage",))
    if reply.status != 200:
        return Answer(error=error_text(data) or f"HTTP {reply.status}")
    return _read_whole(data)


def error_text(data: Any) -> str:
    """The message of an error answer in any of its usual forms, "" when there is none."""
    if not isinstance(data, dict):
        return _shown(str(data))
    for key in ("error", "detail", "message"):
        if data.get(key):
            value = data[key]
            inner = value.get("message") if isinstance(value, dict) else None
            return _shown(inner if isinstance(inner, str) and inner else json.dumps(value, ensure_ascii=False))
    return ""


def _shown(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _read_whole(data: Any) -> Answer:
    if not isinstance(data, dict):
        return Answer(error="the answer is no JSON object", flaws=("garbage",))
    if data.get("error"):
        return Answer(error=error_text(data), flaws=("error_after_200",))
    gather = _Gather()
    choices = data.get("choices")
    gather.choices(choices if isinstance(choices, list) else [], 0, whole=True)
    gather.usage = _usage(data.get("usage"))
    gather.prompt_ids += _ids(data.get("prompt_token_ids"))
    if not choices:
        return Answer(error="the answer has no choice", flaws=("no_choice",))
    flaws = ("no_usage",) if gather.usage is None else ()
    return gather.answer((*gather.flaws, *flaws), "", prompt=bool(data.get("prompt_logprobs")) or gather.prompt)


def _read_stream(reply: Reply) -> Answer:
    decoder, gather, done, error = SseDecoder(), _Gather(), False, ""
    for at_ns, data in reply.reads:
        for event in decoder.feed(data):
            if done:
                gather.flaw("after_done")
                continue
            if not event.intact:
                gather.flaw("broken_utf8")
            if event.data.strip() == DONE:
                done = True
                continue
            error = _one_event(event.data, at_ns, gather) or error
    if not reply.fault:
        for flaw, there in (
            ("no_done", not done and not error),
            ("no_chunk", gather.empty and not error and gather.finish != "stop"),
            ("cut_event", decoder.leftover),
            ("no_finish", gather.seen > 0 and gather.finish is None and not error),
        ):
            if there:
                gather.flaw(flaw)
    return gather.answer(tuple(gather.flaws), error, prompt=gather.prompt)


def _one_event(text: str, at_ns: int, gather: _Gather) -> str:
    """Adds one event to `gather`; gives the message when it is an error event."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        gather.flaw("garbage")
        return ""
    if not isinstance(data, dict):
        gather.flaw("garbage")
        return ""
    if data.get("error") or data.get("object") == "error":
        gather.flaw("error_after_200")
        return error_text(data) or "an error without a message"
    choices = data.get("choices")
    if isinstance(choices, list) and choices:
        gather.choices(choices, at_ns, whole=False)
    if data.get("usage"):
        gather.usage = _usage(data["usage"])
    gather.prompt_ids += _ids(data.get("prompt_token_ids"))
    return ""


@dataclass
class _Gather:
    """What has been read of one answer; only choice 0 is kept, the others are counted."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, list[str]] = field(default_factory=dict)  # name, then pieces of the arguments
    finish: str | None = None
    usage: Usage | None = None
    tokens: list[Token] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    indices: set[int] = field(default_factory=set)
    flaws: list[str] = field(default_factory=list)
    role_ns: int | None = None
    last_ns: int | None = None
    seen: int = 0
    prompt: bool = False

    def flaw(self, name: str) -> None:
        if name not in self.flaws:
            self.flaws.append(name)

    @property
    def empty(self) -> bool:
        """Nothing came at all; tokens without text are an answer, too (half a character, a special token)."""
        return not (self.pieces or self.tokens or self.token_ids)

    def choices(self, choices: Iterable[Any], at_ns: int, *, whole: bool) -> None:
        for place, choice in enumerate(choices):
            if not isinstance(choice, dict):
                self.flaw("garbage")
                continue
            index = choice.get("index", place)
            self.indices.add(index if isinstance(index, int) else place)
            if index in (0, None):
                self._one(choice, at_ns, whole=whole)

    def _one(self, choice: dict[str, Any], at_ns: int, *, whole: bool) -> None:
        self.seen += 1
        self.last_ns = at_ns
        part = choice.get("message" if whole else "delta")
        part = part if isinstance(part, dict) else {}
        content = _text(choice.get("text")) + _text(part.get("content"))
        reasoning = _text(part.get("reasoning_content")) or _text(part.get("reasoning"))
        calls = self._calls(part.get("tool_calls"))
        tokens = read_tokens(choice.get("logprobs"))
        ids = _ids(choice.get("token_ids"))
        self.prompt_ids += _ids(choice.get("prompt_token_ids"))
        self.prompt = self.prompt or bool(choice.get("prompt_logprobs"))
        self.text.append(content)
        self.reasoning.append(reasoning)
        self.tokens += tokens
        self.token_ids += ids
        if content or reasoning or calls:
            if self.finish is not None:
                self.flaw("after_finish")
            self.pieces.append(Piece(at_ns, content or reasoning or calls, len(ids) or len(tokens)))
        elif part.get("role") and self.role_ns is None:
            self.role_ns = at_ns
        if choice.get("finish_reason") is not None:
            self.finish = str(choice["finish_reason"])

    def _calls(self, given: Any) -> str:
        """Joins the pieces of tool calls to what is known of them; their text, "" when there is none."""
        text = ""
        for place, call in enumerate(given if isinstance(given, list) else ()):
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                self.flaw("garbage")
                continue
            index = call.get("index", place)
            kept = self.calls.setdefault(index if isinstance(index, int) else place, [""])
            name, arguments = _text(function.get("name")), _text(function.get("arguments"))
            kept[0] = kept[0] or name
            kept.append(arguments)
            text += name + arguments
        return text

    def answer(self, flaws: tuple[str, ...], error: str, *, prompt: bool) -> Answer:
        text = "".join(self.text)
        if any("\ud800" <= c <= "\udfff" for c in text):
            flaws = (*flaws, "broken_utf8")
        return Answer(
            text=text,
            reasoning="".join(self.reasoning),
            calls=tuple(ToolCall(name, "".join(parts)) for _, (name, *parts) in sorted(self.calls.items())),
            finish=self.finish,
            usage=self.usage,
            tokens=tuple(self.tokens),
            token_ids=tuple(self.token_ids),
            prompt_ids=tuple(self.prompt_ids),
            prompt_logprobs=prompt,
            choices=len(self.indices),
            error=error,
            flaws=flaws,
            pieces=tuple(self.pieces),
            role_ns=self.role_ns,
            last_ns=self.last_ns,
        )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _ids(value: Any) -> list[int]:
    return [i for i in value if isinstance(i, int)] if isinstance(value, list) else []


def _usage(data: Any) -> Usage | None:
    if not isinstance(data, dict):
        return None
    prompt, completion = data.get("prompt_tokens"), data.get("completion_tokens")
    if not _count(prompt) or not _count(completion):
        return None
    details = data.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    total = data.get("total_tokens")
    return Usage(prompt, completion, total if _count(total) else None, cached if _count(cached) else None)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _logprob(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def read_tokens(data: Any) -> list[Token]:
    """Tokens of a `logprobs` object: chat's list `content`, or the parallel lists of completions."""
    if not isinstance(data, dict):
        return []
    if isinstance(data.get("content"), list):
        return [_chat_token(item) for item in data["content"] if isinstance(item, dict)]
    texts, values = data.get("tokens"), data.get("token_logprobs")
    if not isinstance(texts, list) or not isinstance(values, list):
        return []
    tops = data.get("top_logprobs")
    tops = tops if isinstance(tops, list) and len(tops) == len(texts) else [None] * len(texts)
    return [
        Token(str(text), _logprob(value), _best(top.items() if isinstance(top, dict) else ()))
        for text, value, top in zip(texts, values, tops, strict=False)
    ]


def _chat_token(item: dict[str, Any]) -> Token:
    raw = item.get("bytes")
    top = [(t.get("token"), t.get("logprob")) for t in item.get("top_logprobs") or () if isinstance(t, dict)]
    whole = isinstance(raw, list) and all(isinstance(b, int) for b in raw)
    return Token(str(item.get("token", "")), _logprob(item.get("logprob")), _best(top), tuple(raw) if whole else None)


def _best(pairs: Iterable[tuple[Any, Any]]) -> tuple[tuple[str, float], ...]:
    rows = [(str(text), float(value)) for text, value in pairs if _logprob(value) is not None]
    return tuple(sorted(rows, key=lambda row: -row[1]))
