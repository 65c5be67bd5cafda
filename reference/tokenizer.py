"""The byte-level tokenizer of the presets: ids 0 to 255 are bytes, special tokens are in `ModelConfig.tokens`.

Standard library only. Text never becomes a special token, whatever it spells.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from reference.config import ModelConfig
from reference.image_grid import image_grid


def encode(text: str) -> list[int]:
    """The UTF-8 bytes of `text`, one token each."""
    return list(text.encode("utf-8"))


def decode(tokens: Iterable[int]) -> str:
    """The text of the byte tokens; special tokens are left out, bytes that are no UTF-8 become U+FFFD."""
    return bytes(token for token in tokens if 0 <= token < 256).decode("utf-8", errors="replace")


def chat_turn(
    config: ModelConfig, text: str, image_sizes: Sequence[tuple[int, int]] = (), first: bool = True
) -> list[int]:
    """One user turn up to where the assistant speaks: [bos if first] [user] images text [end_of_turn] [assistant].

    `image_sizes`: (width, height) in pixels of each image as it is in its file. An image is [media_begin] "image WxH"
    [media_content] pads [media_end], with one pad per token that the image becomes, and a row break after each row of
    them where the model has one. Raises ValueError when the model has no vision or lacks one of the tokens.
    """
    tokens = config.tokens
    turn = [_special(config, "bos")] if first else []
    turn.append(_special(config, "user"))
    if image_sizes and config.vision is None:
        raise ValueError(f"model {config.name} has no vision; the turn has {len(image_sizes)} images")
    for width, height in image_sizes:
        grid = image_grid(width, height, config.vision)
        turn += [_special(config, "media_begin"), *encode(f"image {width}x{height}"), _special(config, "media_content")]
        if tokens.row_break < 0:
            turn += [tokens.media_pad] * grid.tokens
        else:
            rows = grid.rows // config.vision.merge
            turn += ([tokens.media_pad] * (grid.tokens // rows) + [tokens.row_break]) * rows
        turn.append(_special(config, "media_end"))
    return [*turn, *encode(text), _special(config, "end_of_turn"), _special(config, "assistant")]


def _special(config: ModelConfig, name: str) -> int:
    token = getattr(config.tokens, name)
    if token < 0:
        raise ValueError(f"model {config.name} has no {name} token; its chat format is not the presets'")
    return token
