"""Needles in a haystack, of any length by the endpoint's own count of tokens: a code that is asked for, at a depth.

Every needle is asked for alone first. Only those that are found there can be lost in a long context.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from day0check.load import asks
from day0check.load.prompts import unique
from day0check.load.scenario import Asker

DEPTHS = (0.0, 0.5, 1.0)
NEEDLES = 8
ANSWER_TOKENS = 24
NAMES = ("Ada", "Boris", "Carla", "Deniz", "Emil", "Farah", "Goran", "Hanna")
_CALIBRATION = (40, 400)  # words of two prompts, of which the tokens of a word are learnt


@dataclass(frozen=True)
class Needle:
    name: str
    code: str

    @property
    def sentence(self) -> str:
        return f"The access code of {self.name} is {self.code}."

    @property
    def question(self) -> str:
        return f"What is the access code of {self.name}? Answer with the code alone."


def needles(seed: int) -> tuple[Needle, ...]:
    """Names with codes of six digits; the same for the same seed."""
    draw = random.Random(f"needle/{seed}")
    return tuple(Needle(name, str(draw.randrange(100_000, 1_000_000))) for name in NAMES[:NEEDLES])


def haystack(words: int, depth: float, needle: Needle, *, seed: int) -> str:
    """`words` words with the needle's sentence at `depth` of them, and the question behind."""
    hay = unique(hash_of(needle, words, depth), seed=seed, words=max(1, words)).split(" ")
    at = round(depth * len(hay))
    return " ".join([*hay[:at], needle.sentence, *hay[at:], needle.question])


def hash_of(needle: Needle, words: int, depth: float) -> int:
    """A number of its own for each prompt, so that no two share a prefix."""
    return 500_000 + int(needle.code) % 997 + 1000 * words + round(100 * depth)


async def needle(asker: Asker) -> None:
    """Labels `needle/short/i` and `needle/LENGTH/DEPTH/i`; a length that is refused is left at its first request."""
    seed, every = asker.wish.seed, needles(asker.wish.seed)
    for i, one in enumerate(every):
        body = asks.ask(asker.dialect, f"{one.sentence} {one.question}", max_tokens=ANSWER_TOKENS)
        await asker(f"needle/short/{i}", body)
    per_word, fixed = await _tokens_of_words(asker)
    for length in asker.wish.contexts:
        words = max(1, round((length - fixed - ANSWER_TOKENS) / per_word))
        for depth in DEPTHS:
            for i, one in enumerate(every):
                text = haystack(words, depth, one, seed=seed)
                label = f"needle/{length}/{depth:g}/{i}"
                shown = await asker(label, asks.ask(asker.dialect, text, max_tokens=ANSWER_TOKENS))
                if shown.refused:
                    break
            if shown.refused:
                break


async def _tokens_of_words(asker: Asker) -> tuple[float, float]:
    """(tokens of a word, tokens of everything else), by the endpoint's own count; one token a word when it has none."""
    counts = []
    for words in _CALIBRATION:
        prompt = unique(400_000 + words, seed=asker.wish.seed, words=words)
        shown = await asker(f"needle/count/{words}", asks.ask(asker.dialect, prompt, max_tokens=1))
        usage = shown.answer.usage
        counts.append(usage.prompt_tokens if shown.good and usage else None)
    if None in counts:
        return 1.0, 40.0
    per_word = max(0.25, (counts[1] - counts[0]) / (_CALIBRATION[1] - _CALIBRATION[0]))
    return per_word, counts[0] - per_word * _CALIBRATION[0] + 40 * per_word
