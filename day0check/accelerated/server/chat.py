"""Messages as tokens, in the chat format of the presets.

    [bos] ([user] images and text [end_of_turn] | [assistant] text [end_of_turn])* [assistant]

The format has no place for a system text: it stands before the text of the next user turn, with an empty line between,
and the tools stand there too. What a tool gave back is a user turn `<tool_response>TEXT</tool_response>`. Calls that an
assistant made before are written as the model writes them (`contracts/serve.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from day0check.accelerated.server.schema import (
    AssistantMessage,
    ImagePart,
    Message,
    TextPart,
    Tool,
    ToolMessage,
    UserMessage,
)
from day0check.accelerated.server.vocabulary import Vocabulary
from day0check.accelerated.vision import grid_in_patches
from day0check.errors import Unavailable
from reference.config import ModelConfig

TOOL_TEXT = "Tools, called as <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>:"


@dataclass(frozen=True)
class Picture:
    """An image of the request: its file, size in pixels and the number of tokens that it becomes."""

    path: str
    width: int
    height: int
    tokens: int


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool],
    pictures: Sequence[Picture],
    config: ModelConfig,
    vocabulary: Vocabulary,
) -> list[int]:
    """Tokens of a conversation up to where the assistant speaks. `pictures`: of the image parts, in order.

    Raises Unavailable for a model without the special tokens of the format.
    """
    left, made = iter(pictures), [special(config, "bos")]
    waiting = [_tools_text(tools)] if tools else []
    for message in messages:
        if isinstance(message, AssistantMessage):
            made += [special(config, "assistant"), *vocabulary.encode(_said(message)), special(config, "end_of_turn")]
        elif isinstance(message, (UserMessage, ToolMessage)):
            before = "".join(f"{text}\n\n" for text in waiting)
            waiting = []
            made += [special(config, "user"), *_spoken(message, before, left, config, vocabulary)]
            made.append(special(config, "end_of_turn"))
        else:
            waiting.append(_plain(message.content))
    if waiting:  # nobody has spoken yet
        made += [special(config, "user"), *vocabulary.encode("\n\n".join(waiting)), special(config, "end_of_turn")]
    return [*made, special(config, "assistant")]


def _spoken(
    message: UserMessage | ToolMessage, before: str, pictures: Iterator[Picture], config: ModelConfig, words: Vocabulary
) -> list[int]:
    if isinstance(message, ToolMessage):
        return words.encode(f"{before}<tool_response>{_plain(message.content)}</tool_response>")
    if isinstance(message.content, str):
        return words.encode(before + message.content)
    made = []
    for part in message.content:
        if isinstance(part, ImagePart):
            made += _image(next(pictures), config, words)
        else:
            made += words.encode(before + part.text)
            before = ""
    return made + words.encode(before)


def _image(picture: Picture, config: ModelConfig, words: Vocabulary) -> list[int]:
    return [
        special(config, "media_begin"),
        *words.encode(f"image {picture.width}x{picture.height}"),
        special(config, "media_content"),
        *_pads(picture, config),
        special(config, "media_end"),
    ]


def _pads(picture: Picture, config: ModelConfig) -> list[int]:
    """A media pad for each token of the image, and after each row of them the break of a model that has one."""
    pad, row_break = special(config, "media_pad"), config.tokens.row_break
    if row_break < 0:
        return [pad] * picture.tokens
    rows = grid_in_patches(picture.width, picture.height, config.vision)[1] // config.vision.merge
    return ([pad] * (picture.tokens // rows) + [row_break]) * rows


def _said(message: AssistantMessage) -> str:
    thoughts = f"<think>{message.reasoning_content}</think>" if message.reasoning_content else ""
    calls = "".join(_call(call.function.name, call.function.arguments) for call in message.tool_calls or ())
    return thoughts + _plain(message.content or "") + calls


def _call(name: str, arguments: str) -> str:
    given = json.loads(arguments) if arguments.strip() else {}
    pairs = (
        f"<arg_key>{key}</arg_key><arg_value>"
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</arg_value>"
        for key, value in given.items()
    )
    return f"<tool_call>{name}{''.join(pairs)}</tool_call>"


def _plain(content: str | Sequence[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _tools_text(tools: Sequence[Tool]) -> str:
    lines = (json.dumps(tool.function.model_dump(exclude_none=True), ensure_ascii=False) for tool in tools)
    return "\n".join((TOOL_TEXT, *lines))


def parameter_types(tools: Sequence[Tool]) -> dict[str, dict[str, str]]:
    """JSON type of each parameter of each tool, where the schema names exactly one."""
    found: dict[str, dict[str, str]] = {}
    for tool in tools:
        properties = (tool.function.parameters or {}).get("properties")
        entries = properties.items() if isinstance(properties, dict) else ()
        kinds = {key: value.get("type") for key, value in entries if isinstance(value, dict)}
        found[tool.function.name] = {key: kind for key, kind in kinds.items() if isinstance(kind, str)}
    return found


def special(config: ModelConfig, name: str) -> int:
    """The special token of that name. Raises Unavailable when the model has none."""
    token = getattr(config.tokens, name)
    if token < 0:
        raise Unavailable(
            f"model {config.name} has no {name} token",
            where="chat",
            todo="use /v1/completions: its chat format is its own",
        )
    return token
