"""The prefix cache: pages of whole blocks that several requests share, and states kept at the ends of blocks.

A block is the content of one page. It is known by its tokens, what salts them and the block before it, so a hit needs
every block from the first position on. A page that is known is full: nobody writes it again, and so nobody copies it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from day0check.accelerated.cache import Caches
from day0check.accelerated.ops.prefix import ENTRY, HEAD, KEY, PARENT, SNAPSHOT, chain
from day0check.errors import Day0Error, InputError
from day0check.probe.recorder import Caller
from day0check.probe.rows import RowMap
from reference.config import ModelConfig

if TYPE_CHECKING:
    from day0check.accelerated.scheduler import Running

FIRST_ENTRY = 1


@dataclass
class Chain:
    """What the cache knows of one request: blocks entered or found so far, the last of them, and the salts."""

    blocks: int = 0
    entry: int = 0
    key: int = 0
    salts: Tensor | None = None  # int64 [tokens so far, 2]


@dataclass
class PrefixCounters:
    """Since the start. Tokens that were looked for and found, blocks found, entered and given up, snapshots kept."""

    query_tokens: int = 0
    hit_tokens: int = 0
    hit_blocks: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
    stored_snapshots: int = 0


@dataclass
class PrefixCache:
    """Looks prefixes up and enters blocks, through the operators of the family `prefix`.

    `space` tells models and adapters apart: it salts every token. States are kept after every `every` blocks; a model
    without states needs none, and every block of it can end a hit. Raises InputError for pages that hold no whole
    number of pools.
    """

    caches: Caches
    config: ModelConfig
    every: int = 1
    space: str = ""
    counters: PrefixCounters = field(default_factory=PrefixCounters)

    def __post_init__(self) -> None:
        caches, index = self.caches, self.config.index
        if index is not None and caches.page % index.pool:
            raise InputError(
                f"pages of {caches.page} positions cut pools of {index.pool} tokens",
                where="schedule.page with prefix_cache",
                todo=f"use a multiple of {index.pool}",
            )
        self.held = torch.full((caches.pages.size, HEAD + 3 * caches.page), -1, dtype=torch.int64)
        self.stateful = bool(caches.states())
        self._entries = FIRST_ENTRY
        self._pages: dict[int, int] = {}  # entry -> page
        self._by_key: dict[int, int] = {}  # chain key -> entry
        self._keys: dict[int, int] = {}  # page -> chain key
        self._spare = -1  # the slot of the next snapshot
        self._plain = _lanes(f"{self.space}")
        caches.pages.known, caches.pages.forget = self._keys.__contains__, self._forget

    # ----------------------------------------------------------------------------------------------------- asking

    def next_end(self, computed: int) -> int | None:
        """The position at which a step must end so that states can be kept there; None where none are needed."""
        block = self.caches.page * self.every
        return (computed // block + 1) * block if self.stateful else None

    def find(self, caller: Caller, running: Running, *, step: int) -> None:
        """Lets a request that has just been admitted begin behind the longest prefix that is known.

        At least one token is left to be computed. The pages are held, the states lie in the request's slot.
        """
        tokens = running.tokens[:-1]
        running.chain = Chain(salts=running.chain.salts)
        if len(tokens) < self.caches.page:
            return
        self.counters.query_tokens += len(tokens)
        rows = RowMap((running.request.id,), (0,) * len(tokens), tuple(range(len(tokens))))
        with caller.recorder.between("prefill", rows, step):
            salts = self._salts(running)[: len(tokens)]
            pages = caller.at("")("prefix.match", torch.tensor(tokens), salts=salts, held=self.held).tolist()
            if not pages:
                return
            length = len(pages) * self.caches.page
            if length > len(tokens):
                raise Day0Error(
                    f"{len(pages)} pages for a prefix of {len(tokens)} tokens",
                    where="prefix.match",
                    todo="at least one token must be left to be computed",
                )
            running.tenancy.adopt(pages)
            self._restore(caller, running, int(self.held[pages[-1], SNAPSHOT]), length)
        running.computed = length
        running.chain.blocks, running.chain.entry = len(pages), int(self.held[pages[-1], ENTRY])
        running.chain.key = self._keys.get(pages[-1], 0)
        self.counters.hit_tokens += length
        self.counters.hit_blocks += len(pages)

    def _restore(self, caller: Caller, running: Running, snapshot: int, length: int) -> None:
        row = RowMap((running.request.id,), (0,), (length - 1,))
        at_slot = torch.tensor([running.tenancy.slot], device=self.caches.device)
        at_snapshot = torch.tensor([snapshot], device=self.caches.device)
        for layer, kind, pool in self.caches.states():
            at = caller.at(f"layers.{layer:02d}")
            state = at("prefix.restore", pool, site=kind, row_map=row, slots=at_snapshot)
            at("state.store", pool, site=kind, row_map=row, value=state, slots=at_slot)

    # ---------------------------------------------------------------------------------------------------- entering

    def enter(self, caller: Caller, running: Running, *, phase: str, step: int) -> None:
        """Enters the blocks that a request has filled with its latest rows, and the states at their end.

        What is filled to its end is said by `prefix.register`; a single token that fills nothing is not asked about.
        """
        page, known = self.caches.page, running.chain
        self._pass_known(running)
        if known.entry and known.entry not in self._pages:
            return  # the block before has been given up: what follows could not be found
        filled = running.computed // page
        if running.computed < known.blocks * page:
            return  # `prefix.register` has entered more than was filled: no block is entered twice
        if running.computed == known.blocks * page:
            again = self._lacks_snapshot(known)
            if not again:
                return
            blocks, first = [self._pages[known.entry]], known.blocks - 1
            entries, parent = [known.entry], int(self.held[blocks[0], PARENT])
        elif phase == "decode" and filled == known.blocks:
            return
        else:
            again, blocks, first, parent = False, running.tenancy.table[known.blocks :], known.blocks, known.entry
            entries = list(range(self._entries, self._entries + len(blocks)))
        span = range(first * page, min(len(running.tokens), (first + len(blocks)) * page))
        with caller.recorder.between(phase, RowMap((running.request.id,), (0,) * len(span), tuple(span)), step):
            self._register(caller, running, span, blocks, entries, parent)
            taken = 0 if again else self._book(running, blocks, entries)
            slot = self.held[blocks[taken - 1], SNAPSHOT] if taken or again else -1
            if self._spare >= 0 and int(slot) == self._spare:
                self._store(caller, running)

    def _register(
        self,
        caller: Caller,
        running: Running,
        span: range,
        blocks: list[int],
        entries: list[int],
        parent: int,
    ) -> None:
        """Asks for the tokens of `span` to be entered as blocks on the pages `blocks`, as far as they are absorbed."""
        page = self.caches.page
        snapshots = [-1 if self.stateful else 0] * len(blocks)
        filling = (running.computed - 1) // page
        if self.stateful and (filling + 1) % self.every == 0:
            self._spare = self._snapshot_slot() if self._spare < 0 else self._spare
            snapshots[filling - span.start // page] = self._spare
        caller.at("")(
            "prefix.register",
            self.held,
            tokens=torch.tensor(running.tokens[span.start : span.stop]),
            salts=self._salts(running)[span.start : span.stop],
            at=torch.tensor([span.start, running.computed]),
            table=torch.tensor(blocks),
            entries=torch.tensor(entries),
            parent=torch.tensor([parent]),
            snapshots=torch.tensor(snapshots),
        )

    def _book(self, running: Running, blocks: list[int], entries: list[int]) -> int:
        """Remembers the blocks that were entered; how many they are."""
        known, taken = running.chain, 0
        for page, entry in zip(blocks, entries, strict=True):
            if int(self.held[page, ENTRY]) != entry:
                break
            key = int(self.held[page, KEY])
            self._pages[entry], self._by_key[key], self._keys[page] = page, entry, key
            known.blocks, known.entry, known.key, taken = known.blocks + 1, entry, key, taken + 1
        self._entries += taken
        self.counters.stored_blocks += taken
        return taken

    def _pass_known(self, running: Running) -> None:
        """Goes past the blocks that another request has entered meanwhile: they are not entered twice."""
        page, known = self.caches.page, running.chain
        begin, end = known.blocks * page, running.computed // page * page
        if begin >= end:
            return
        tokens = torch.tensor(running.tokens[begin:end])
        for key in chain(tokens, self._salts(running)[begin:end], page=page, key=known.key):
            if key not in self._by_key:
                return
            known.blocks, known.key, known.entry = known.blocks + 1, key, self._by_key[key]

    def _lacks_snapshot(self, known: Chain) -> bool:
        """Whether the latest block of a request is known without the states at its end, which the request has now."""
        wanted = self.stateful and known.blocks > 0 and known.blocks % self.every == 0
        return wanted and int(self.held[self._pages[known.entry], SNAPSHOT]) < 0

    def _store(self, caller: Caller, running: Running) -> None:
        """Keeps the states of a request, as they are now, in the spare slot."""
        row = RowMap((running.request.id,), (0,), (running.computed - 1,))
        at_slot = torch.tensor([running.tenancy.slot], device=self.caches.device)
        at_snapshot = torch.tensor([self._spare], device=self.caches.device)
        for layer, kind, pool in self.caches.states():
            at = caller.at(f"layers.{layer:02d}")
            state = at("state.load", pool, site=kind, row_map=row, slots=at_slot)
            at("prefix.store", pool, site=kind, row_map=row, value=state, slots=at_snapshot)
        self._spare = -1
        self.counters.stored_snapshots += 1

    # --------------------------------------------------------------------------------------------------- giving up

    def _forget(self, page: int) -> None:
        """What lay on a page is given up: the page gets another content."""
        self._by_key.pop(self._keys.pop(page))
        self._pages.pop(int(self.held[page, ENTRY]), None)
        self._drop_snapshot(page)
        self.held[page] = -1
        self.counters.evicted_blocks += 1

    def _drop_snapshot(self, page: int) -> bool:
        slot = int(self.held[page, SNAPSHOT])
        if slot < 0 or not self.stateful:
            return False
        self.held[page, SNAPSHOT] = -1
        self.caches.snapshots.give([slot])
        return True

    def _snapshot_slot(self) -> int:
        """A free slot for a snapshot, if need be that of the block that nobody has used for longest; -1: none."""
        snapshots = self.caches.snapshots
        if not len(snapshots):
            next((page for page in list(self.caches.pages.idle) if self._drop_snapshot(page)), None)
        return snapshots.take() if len(snapshots) else -1

    # ------------------------------------------------------------------------------------------------------- salts

    def _salts(self, running: Running) -> Tensor:
        """int64 [tokens, 2]: the space of every token, and for media pads the images of their turn as well."""
        salts, tokens = running.chain.salts, running.tokens
        done = 0 if salts is None else len(salts)
        if done < len(tokens):
            new = torch.tensor(self._plain).repeat(len(tokens) - done, 1)
            for begin, end, images in _turns(running):
                pads = [p for p in range(max(begin, done), end) if tokens[p] == self.config.tokens.media_pad]
                if images and pads:
                    new[torch.tensor(pads) - done] = torch.tensor(self._images(images))
            salts = running.chain.salts = new if salts is None else torch.cat((salts, new))
        return salts

    def _images(self, images: tuple[str, ...]) -> tuple[int, int]:
        contents = (hashlib.sha256(Path(image).read_bytes()).hexdigest() for image in images)
        return _lanes("\x1f".join((self.space, *contents)))


def _turns(running: Running) -> list[tuple[int, int, tuple[str, ...]]]:
    """(first position, position behind, images) of the tokens that came with each turn so far."""
    ends = [begin for begin, _ in running.spans]
    turns = zip(ends, running.request.turns, strict=False)
    return [(end - len(turn.tokens), end, turn.images) for end, turn in turns]


def _lanes(text: str) -> tuple[int, int]:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1, int.from_bytes(digest[8:16], "little") >> 1
