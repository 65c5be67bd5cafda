"""Tokens as bytes and text as tokens, and the tokens that end an answer, from the files beside the weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from day0check.errors import InputError, Unavailable
from reference.config import ModelConfig

BYTES = 256
END_OF_ANSWER = ("eos", "end_of_turn")  # of ModelConfig.tokens


@dataclass(frozen=True)
class Vocabulary:
    """`pieces[token]`: the bytes of a token, b"" for special ones, which have a name in `names`.

    `ends`: every token that ends an answer, the union of config.json, generation_config.json and the tokenizer's.
    `encode`: ordinary text to tokens; text never becomes a special token.
    """

    pieces: tuple[bytes, ...]
    names: Mapping[int, str]
    ends: tuple[int, ...]
    encode: Callable[[str], list[int]]

    def shown(self, token: int) -> str:
        """A token as a client sees it: its text, a special token's name, or `bytes:\\xe2` for a part of a character."""
        if token in self.names:
            return self.names[token]
        try:
            return self.pieces[token].decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.pieces[token])

    def text(self, tokens: Iterable[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode("utf-8", errors="replace")


def read_vocabulary(directory: Path, config: ModelConfig) -> Vocabulary:
    """The vocabulary of a model directory. Raises Unavailable for a tokenizer that is not byte-level tokens 0 to 255,
    InputError for files that cannot be read."""
    tokenizer = _json(directory / "tokenizer_config.json")
    kind = tokenizer.get("tokenizer_class")
    if kind != "ByteLevel":
        raise Unavailable(
            f"the tokenizer {kind or 'without a class'} is not one that the server knows",
            where=str(directory / "tokenizer_config.json"),
            todo="the embedded server speaks the byte tokens of the presets (tokenizer_class ByteLevel)",
        )
    added = {int(key): entry["content"] for key, entry in tokenizer.get("added_tokens_decoder", {}).items()}
    pieces = tuple(bytes([token]) if token < BYTES else b"" for token in range(config.vocab))
    names = {token: added.get(token, f"<|{token}|>") for token in range(BYTES, config.vocab)}
    return Vocabulary(pieces, names, stop_tokens(config, _json(directory / "generation_config.json")), _encode)


def stop_tokens(config: ModelConfig, generation: Mapping[str, Any]) -> tuple[int, ...]:
    """Every token that ends an answer: those of the tokenizer and of config.json joined by generation_config.json's
    `eos_token_id`, never replaced by it."""
    given = generation.get("eos_token_id")
    given = given if isinstance(given, list) else [given]
    known = [getattr(config.tokens, name) for name in END_OF_ANSWER]
    return tuple(sorted({t for t in (*known, *given) if isinstance(t, int) and 0 <= t < config.vocab}))


def _encode(text: str) -> list[int]:
    return list(text.encode("utf-8"))


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read as JSON: {error}", where=str(path), todo="repair the file") from error
    if not isinstance(found, dict):
        raise InputError("is no JSON object", where=str(path), todo="repair the file")
    return found
