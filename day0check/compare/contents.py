"""Content identity: what a row of a cache is about, as a hash chain over everything that it may depend on.

The identity of position p of a request is made of its tokens and images from the first one up to p. Two requests that
begin alike have the same identities as far as they do; a position whose token changes (a draft that is rolled back)
changes its own identity and those behind it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from day0check.probe.rows import PADDING, RowMap
from day0check.types import Request

_MASK = (1 << 64) - 1
_TOKEN, _CHAIN = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # odd, from the golden ratio and from xxHash64


@dataclass
class _Sequence:
    """Tokens of one request, and the chain as far as it was worked out; `pads[p]`: media pads up to position p."""

    tokens: list[int] = field(default_factory=list)
    chain: list[int] = field(default_factory=list)
    pads: list[int] = field(default_factory=list)
    stored: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def cut(self, length: int) -> None:
        """Forgets what lies behind the first `length` positions."""
        del self.tokens[length:], self.chain[length:], self.pads[length:]
        self.stored = self.stored[:length]


class Contents:
    """The identities of the requests of a run, from the tokens that it embeds and those of a prefix that it looks up.

    `requests` gives the images of their turns, and the tokens of a first turn that nobody embedded. A place that
    embeds tokens of its own (a draft layer) has its own sequences.
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._requests = {request.id: request for request in requests}
        self._salts: dict[str, tuple[int, ...]] = {}
        self._sequences: dict[tuple[str, str], _Sequence] = {}
        self._places: set[str] = set()
        self._media_pad: int | None = None

    def embed(self, place: str, rows: RowMap, ids: Sequence[int]) -> None:
        """`ids`: the token of each row. A row in front of what is known forgets what lies behind it."""
        self._places |= {place} - {""}
        for owner, position, token in zip(rows.owner, rows.position, ids, strict=True):
            if owner == PADDING:
                continue
            sequence = self._sequence(place, rows.requests[owner])
            if position < len(sequence.tokens):
                sequence.cut(position)
            if position == len(sequence.tokens):  # behind a gap nothing is known
                sequence.tokens.append(int(token))

    def begin(self, request: str, tokens: Sequence[int]) -> None:
        """The tokens from the first one on with which a request looks for what others have computed."""
        sequence = self._sequence("", request)
        sequence.cut(0)
        sequence.tokens += map(int, tokens)

    def pads(self, token: int) -> None:
        """`token` stands where images are spliced in."""
        if token != self._media_pad:
            self._media_pad = token
            self._salts = {name: _salts(request, token) for name, request in self._requests.items()}
            for sequence in self._sequences.values():
                sequence.chain, sequence.pads, sequence.stored = [], [], sequence.stored[:0]

    def of(self, place: str, request: str) -> torch.Tensor:
        """int64 [n]: identities of the first n positions of a request at `place`, as far as its tokens are known."""
        sequence = self._sequence(place if place in self._places else "", request)
        start = len(sequence.chain)
        if start == len(sequence.tokens):
            return sequence.stored
        salts, value = self._salts.get(request, ()), sequence.chain[-1] if start else 0
        pads = sequence.pads[-1] if start else 0
        for token in sequence.tokens[start:]:
            salt = 0
            if token == self._media_pad and salts:
                salt = salts[min(pads, len(salts) - 1)]
                pads += 1
            value = _mixed(value * _CHAIN + (token + 1) * _TOKEN + salt)
            sequence.chain.append(value)
            sequence.pads.append(pads)
        new = torch.tensor([_signed(value) for value in sequence.chain[start:]], dtype=torch.int64)
        sequence.stored = torch.cat((sequence.stored, new))
        return sequence.stored

    def _sequence(self, place: str, request: str) -> _Sequence:
        key = (place, request)
        if key not in self._sequences:
            known = self._requests.get(request)
            first = list(known.turns[0].tokens) if known is not None and known.turns and not place else []
            self._sequences[key] = _Sequence(first)
        return self._sequences[key]


def _salts(request: Request | None, media_pad: int | None) -> tuple[int, ...]:
    """What tells each media pad of a request apart, in order: the content of the images of its turn."""
    turns = () if request is None or media_pad is None else request.turns
    found: list[int] = []
    for turn in turns:
        count = turn.tokens.count(media_pad) if turn.images else 0
        found += [_content(turn.images)] * count if count else []
    return tuple(found)


def _content(images: Sequence[str]) -> int:
    """A number of 64 bits for the files of a turn; of their names where they cannot be read."""
    digest = hashlib.sha256()
    for image in images:
        try:
            digest.update(hashlib.sha256(Path(image).read_bytes()).digest())
        except OSError:
            digest.update(image.encode())
    return int.from_bytes(digest.digest()[:8], "little") | 1


def _mixed(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 31)) * _TOKEN) & _MASK
    return value ^ (value >> 29)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
