"""From a parsed request to orders for the engine; what does not fit this model is refused with the field's name."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from day0check.accelerated.server.chat import Picture, parameter_types, render
from day0check.accelerated.server.images import BadImage, ImageLimits, image_tokens, store_image
from day0check.accelerated.server.orders import Order
from day0check.accelerated.server.schema import Asked, ChatRequest, CompletionRequest, ImagePart, UserMessage
from day0check.accelerated.server.vocabulary import Vocabulary
from day0check.errors import Unavailable
from reference.config import ModelConfig

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's


class Refused(Exception):
    """The client's fault: an HTTP status, a sentence, the field, and a code for programs."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: dict[str, str] = {}


@dataclass(frozen=True)
class Served:
    """What a request is planned against. `max_model_len`: positions of prompt and answer together."""

    name: str
    config: ModelConfig
    vocabulary: Vocabulary
    max_model_len: int
    max_prompts: int = 64  # in one request
    images: ImageLimits = field(default_factory=ImageLimits)


def plan_completion(asked: CompletionRequest, served: Served, *, request_id: str) -> list[Order]:
    """One order a prompt. Raises Refused."""
    prompts = _prompts(asked.prompt, served)
    wanted = [top for top in (asked.prompt_logprobs, asked.logprobs if asked.echo else None) if top is not None]
    limit = DEFAULT_COMPLETION_TOKENS if asked.max_tokens is None else asked.max_tokens
    if asked.max_tokens is None and asked.forced_token_ids:
        limit = len(asked.forced_token_ids)
    return [
        _order(
            f"{request_id}-{number}",
            prompt,
            asked,
            served,
            limit=limit,
            top=asked.logprobs,
            prompt_top=max(wanted, default=None),
            where="prompt",
        )
        for number, prompt in enumerate(prompts)
    ]


def plan_chat(
    asked: ChatRequest, served: Served, *, request_id: str, folder: Path
) -> tuple[Order, dict[str, dict[str, str]]]:
    """The order of a conversation, images stored in `folder`, and the parameter types of its tools. Raises Refused."""
    pictures = _pictures(asked, served, folder)
    tools = (asked.tools or ()) if asked.tool_choice != "none" else ()
    try:
        prompt = render(
            asked.messages, tools=tools, pictures=pictures, config=served.config, vocabulary=served.vocabulary
        )
    except Unavailable as error:
        raise Refused(f"{error.what}; {error.todo}", param="messages", code="unsupported") from error
    limit = asked.limit()
    if limit is None:
        limit = len(asked.forced_token_ids or ()) or max(1, served.max_model_len - len(prompt))
    order = _order(
        f"{request_id}-0",
        tuple(prompt),
        asked,
        served,
        limit=limit,
        top=(asked.top_logprobs or 0) if asked.logprobs else None,
        prompt_top=asked.prompt_logprobs,
        where="messages",
        images=tuple(picture.path for picture in pictures),
    )
    return order, parameter_types(tools)


def _prompts(prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]], served: Served) -> list[tuple]:
    if isinstance(prompt, str):
        found = [tuple(served.vocabulary.encode(prompt))]
    elif prompt and isinstance(prompt[0], int):
        found = [tuple(prompt)]
    else:
        found = [tuple(served.vocabulary.encode(p) if isinstance(p, str) else p) for p in prompt]
    if not found or not all(found):
        raise Refused("a prompt is empty", param="prompt", code="empty_prompt")
    if len(found) > served.max_prompts:
        raise Refused(f"has {len(found)} prompts, more than {served.max_prompts}", param="prompt")
    for tokens in found:
        _check_tokens(tokens, served, "prompt")
        if served.config.tokens.media_pad in tokens:
            raise Refused("holds the token of an image, which needs a chat request", param="prompt")
    return found


def _check_tokens(tokens: Sequence[int], served: Served, where: str) -> None:
    vocab = served.config.vocab
    bad = next((token for token in tokens if not 0 <= token < vocab), None)
    if bad is not None:
        raise Refused(f"token {bad} is outside 0..{vocab - 1}", param=where, code="token_out_of_range")


def _order(
    name: str,
    prompt: tuple[int, ...],
    asked: Asked,
    served: Served,
    *,
    limit: int,
    top: int | None,
    prompt_top: int | None,
    where: str,
    images: tuple[str, ...] = (),
) -> Order:
    if len(prompt) + limit > served.max_model_len:
        raise Refused(
            f"{len(prompt)} prompt tokens and {limit} of the answer are more than the {served.max_model_len} positions "
            "of this server",
            param=where if len(prompt) >= served.max_model_len else "max_tokens",
            code="context_length_exceeded",
        )
    forced = tuple(asked.forced_token_ids or ())
    for given, field_name in ((forced, "forced_token_ids"), (asked.stop_token_ids or (), "stop_token_ids")):
        _check_tokens(given, served, field_name)
    if len(forced) > limit:
        raise Refused(f"{len(forced)} forced tokens are more than {limit} of the answer", param="forced_token_ids")
    for given, field_name in ((top, "logprobs"), (prompt_top, "prompt_logprobs")):
        if given is not None and given > served.config.vocab:
            raise Refused(f"the vocabulary has {served.config.vocab} tokens", param=field_name)
    ends = () if asked.ignore_eos else served.vocabulary.ends
    return Order(
        id=name,
        prompt=prompt,
        max_new_tokens=limit,
        images=images,
        temperature=1.0 if asked.temperature is None else asked.temperature,
        seed=secrets.randbits(63) if asked.seed is None else asked.seed,
        forced=forced,
        ends=tuple(sorted({*ends, *(asked.stop_token_ids or ())})),
        strings=asked.strings(),
        top=top,
        prompt_top=prompt_top,
    )


def _pictures(asked: ChatRequest, served: Served, folder: Path) -> list[Picture]:
    parts = [
        (f"messages.{m}.content.{p}.image_url.url", part.image_url.url)
        for m, message in enumerate(asked.messages)
        if isinstance(message, UserMessage) and not isinstance(message.content, str)
        for p, part in enumerate(message.content)
        if isinstance(part, ImagePart)
    ]
    if parts and served.config.vision is None:
        raise Refused(f"model {served.name} takes no images", param=parts[0][0], code="unsupported")
    if len(parts) > served.images.images:
        raise Refused(f"{len(parts)} images are more than {served.images.images}", param="messages")
    found = []
    for number, (where, url) in enumerate(parts):
        path = folder / f"image-{number}"
        try:
            width, height = store_image(url, path, limits=served.images)
        except BadImage as error:
            raise Refused(f"the image {error}", param=where, code="bad_image") from error
        found.append(Picture(str(path), width, height, image_tokens((width, height), served.config.vision)))
    return found
