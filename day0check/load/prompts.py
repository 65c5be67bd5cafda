"""Prompts. No two begin alike, so that no prefix is warm unless it is meant to be."""

from __future__ import annotations

import hashlib
import random

_WORDS = (
    "river stone window paper green seven market garden letter silver winter bridge corner music table orange "
    "harbour lantern meadow copper thunder velvet puzzle basket candle mirror forest ticket engine island"
).split()

# Characters of one to four bytes, joined emoji, combining marks, right-to-left text: a wrong cut breaks them
MULTIBYTE = (
    "Repeat exactly: naïve façade, Grüße, señor.",
    "请把这句话翻译成英文：今天天气很好，我们去公园散步吧。",
    "Say it again: 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪 e\u0301 n\u0303",
    "שלום עולם and مرحبا بالعالم and привет, мир",
)


def unique(number: int, *, seed: int, words: int) -> str:
    """A prompt of about `words` words whose first characters are its own; the same for the same numbers."""
    key = hashlib.sha256(f"{seed}/{number}".encode()).hexdigest()
    draw = random.Random(key)
    return f"{key[:8]} " + " ".join(draw.choice(_WORDS) for _ in range(max(0, words - 1)))


def canary(number: int, *, seed: int) -> str:
    """Twelve letters that occur nowhere else: in another request's answer they can only have leaked."""
    key = hashlib.sha256(f"canary/{seed}/{number}".encode()).digest()
    return "".join(chr(ord("a") + byte % 26) for byte in key[:12])
