"""Requests in the words of the two APIs. Greedy and of fixed length unless a field says otherwise."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
Api = Literal["chat", "completions"]
IMAGE_SIDE = 56


@dataclass(frozen=True)
class Dialect:
    """How to speak to this endpoint: API, served model, and the extensions that it honours."""

    api: Api
    model: str
    logprobs: bool = False

    @property
    def path(self) -> str:
        return CHAT if self.api == "chat" else COMPLETIONS


def ask(dialect: Dialect, prompt: str, *, max_tokens: int, stream: bool = False, **fields: Any) -> dict[str, Any]:
    """The body of a request for a continuation of `prompt`."""
    body: dict[str, Any] = {"model": dialect.model, "max_tokens": max_tokens, "temperature": 0}
    if dialect.api == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if dialect.logprobs:
        body |= with_logprobs(dialect.api)
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | fields


def with_logprobs(api: Api) -> dict[str, Any]:
    """The fields that ask for the two best tokens' log-probabilities."""
    return {"logprobs": True, "top_logprobs": 2} if api == "chat" else {"logprobs": 2}


def conversation(dialect: Dialect, turns: Sequence[str], *, max_tokens: int, **fields: Any) -> dict[str, Any]:
    """A chat of user and assistant turns in alternation, the last one the user's."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
    return ask(dialect, "", max_tokens=max_tokens, **fields) | {"messages": messages}


def about_image(dialect: Dialect, text: str, image: bytes, *, max_tokens: int) -> dict[str, Any]:
    """A chat request with one PNG as a data URI and a text after it."""
    uri = "data:image/png;base64," + base64.b64encode(image).decode()
    content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": text}]
    return ask(dialect, "", max_tokens=max_tokens) | {"messages": [{"role": "user", "content": content}]}


def picture(seed: int, side: int = IMAGE_SIDE) -> bytes:
    """A PNG of coloured squares, all of one size whatever the seed."""
    from PIL import Image

    draw = random.Random(seed)
    small = Image.new("RGB", (4, 4))
    small.putdata([tuple(draw.randrange(256) for _ in range(3)) for _ in range(16)])
    out = io.BytesIO()
    small.resize((side, side), Image.Resampling.NEAREST).save(out, "PNG")
    return out.getvalue()
