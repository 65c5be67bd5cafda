"""Between an endpoint's answers and the reference: prompts as token ids, and the token ids of the answers."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from day0check.checks.endpoint.interference import doubtful
from day0check.errors import InputError

if TYPE_CHECKING:
    from day0check.compare.wire import WireAnswer
    from day0check.load.observed import Observed
    from day0check.load.records import Answer, Exchange
    from reference.config import ModelConfig

LENGTHS = (9, 33, 64, 65, 120, 17)
PARTING_AT, PARTED_LENGTH = 40, 110  # begins as the longest and parts from it inside a page of any usual size
FIRST_ID, BYTES = 32, 127  # printable ASCII as bytes: ordinary ids in every vocabulary
_TOKEN_ID = re.compile(r"token_id:(\d+)")


def prompts(config: ModelConfig, *, seed: int) -> tuple[tuple[int, ...], ...]:
    """Prompts of ordinary token ids, lengths around the edges of pages and chunks, the last one with the beginning of
    an earlier one, which a cache of prefixes may know; the same for the same seed."""
    draw = random.Random(seed)
    most = min(BYTES, config.vocab)
    made = tuple(
        tuple(draw.randrange(FIRST_ID, most) for _ in range(length))
        for length in LENGTHS
        if length < config.max_positions
    )
    long = max(made, key=len, default=())
    if len(long) < PARTED_LENGTH:
        return made
    other = tuple(draw.randrange(FIRST_ID, most) for _ in range(PARTED_LENGTH - PARTING_AT))
    return (*made, (*long[:PARTING_AT], *other))


def ends_of(directory: Path, config: ModelConfig) -> tuple[int, ...]:
    """Every token that ends an answer: those of the configuration and the tokenizer, and those that
    generation_config.json adds. Raises InputError for a file that cannot be read."""
    file = directory / "generation_config.json"
    try:
        given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read as JSON: {error}", where=str(file), todo="repair the file") from error
    added = given.get("eos_token_id") if isinstance(given, dict) else None
    every = [config.tokens.eos, config.tokens.end_of_turn, *(added if isinstance(added, list) else [added])]
    return tuple(sorted({token for token in every if isinstance(token, int) and 0 <= token < config.vocab}))


def followable(exchanges: Sequence[Exchange]) -> tuple[tuple[WireAnswer, ...], str]:
    """The answers whose token ids are known, and why others could not be followed ("" when all could)."""
    from day0check.compare.wire import WireAnswer

    asked = [e for e in exchanges if e.label.startswith("follow/")]
    found, reason = [], ""
    for e in asked:
        ids = token_ids(e.answer)
        if not e.good:
            reason = reason or f"{e.label!r} got no answer: {e.answer.error or e.reply.detail}"
        elif not ids:
            reason = reason or "the endpoint names no token ids (return_token_ids, return_tokens_as_token_ids)"
        else:
            found.append(WireAnswer(e.label, tuple(e.asked["prompt"]), ids, _logprobs(e.answer)))
    return tuple(found), reason if asked else "no prompt for the reference was sent"


def in_doubt(observed: Observed) -> tuple[WireAnswer, ...]:
    """Answers that changed beside others by too much for rounding and too little for a fault, where the endpoint names
    the tokens of every one of them; else none."""
    from day0check.compare.wire import WireAnswer

    doubted = [observed.get(label) for label in doubtful(observed)]
    found = [
        WireAnswer(e.label, e.answer.prompt_ids, token_ids(e.answer), _logprobs(e.answer))
        for e in doubted
        if e is not None and e.answer.prompt_ids and token_ids(e.answer)
    ]
    return tuple(found) if len(found) == len(doubted) else ()


def _logprobs(answer: Answer) -> tuple[float, ...] | None:
    given = answer.logprobs
    return given if given is not None and len(given) == len(token_ids(answer)) else None


def token_ids(answer: Answer) -> tuple[int, ...]:
    """Ids of the generated tokens, from `token_ids` or from tokens that are written "token_id:17"; () if unknown."""
    if answer.token_ids:
        return answer.token_ids
    matches = [_TOKEN_ID.fullmatch(t.text) for t in answer.tokens]
    return tuple(int(m[1]) for m in matches) if matches and all(matches) else ()
