"""Memory of running requests: paged pools for latents and index keys, slots for KDA and convolution states."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from day0check.accelerated.ops import paging
from day0check.accelerated.pool_memory import check_kind, new_pool, seed_of, spare
from day0check.accelerated.prefix_chunks import PrefixWorkspace
from day0check.accelerated.records import Formats
from day0check.errors import Unavailable
from day0check.probe.registry import OwnedPool
from reference.config import ModelConfig

PAGED, STATES = ("kv", "index"), ("conv", "kda", "pool")


class FreeList:
    """Numbers 0..count-1, given out in shuffled order so that nothing may assume neighbours, the longest free first.

    `generation[n]` counts how often n was given out: a reader that remembers it can tell a number that changed hands.
    """

    def __init__(self, count: int, seed: int = 0, *, first: int = 0) -> None:
        numbers = list(range(first, first + count))
        random.Random(seed).shuffle(numbers)
        self.size, self._free = count, deque(numbers)
        self.generation = [0] * (first + count)

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """One free number. Raises Unavailable when none is left."""
        if not self._free:
            raise Unavailable("the cache is full", where="accelerated cache", todo="lower max_batch or the context")
        number = self._free.popleft()
        self.generation[number] += 1
        return number

    def give(self, numbers: list[int]) -> None:
        self._free.extend(numbers)

    def keep_from(self, first: int) -> None:
        """Numbers below `first` are never given out."""
        self._free = deque(number for number in self._free if number >= first)


class PagePool(FreeList):
    """Pages with holders. `counts` [pages] says how many requests hold each; the operator `pool.release` writes it.

    A page whose content is `known` (to a prefix cache) stays `idle` when nobody holds it any more, and is taken only
    when no other is free, the one that was idle for longest first; `forget` is told before its content goes.
    """

    def __init__(self, count: int, seed: int = 0) -> None:
        super().__init__(count, seed)
        self.counts = torch.zeros(count, dtype=torch.int64)
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.known: Callable[[int], bool] = lambda page: False
        self.forget: Callable[[int], None] = lambda page: None

    def __len__(self) -> int:
        """Pages that can be taken, whether or not their content is known."""
        return len(self._free) + len(self.idle)

    def take(self) -> int:
        if not self._free and self.idle:
            page, _ = self.idle.popitem(last=False)
            self.forget(page)
            self._free.append(page)
        page = super().take()
        self.counts[page] = 1
        return page

    def hold(self, pages: list[int]) -> None:
        """One more holder for pages whose content is known."""
        for page in pages:
            self.idle.pop(page, None)
            self.counts[page] += 1

    def give(self, numbers: list[int]) -> None:
        """Pages that a holder has let go of; those that nobody holds can be taken, the last of a table first."""
        for page in reversed(numbers):
            if int(self.counts[page]) > 0:
                continue
            if self.known(page):
                self.idle[page] = None
            else:
                self._free.append(page)


class Caches:
    """Pools of all layers. One page number means the same page in every layer, one slot the same slot.

    `kv[layer]` [pages, page, kv_lora + rope], `index[layer]` [pages, index_page, dI], both in the activation type;
    `conv[layer]` [slots, W-1, C] in the activation type, `kda[layer]` [slots, H, dk, dv] float32. Where index keys are
    pooled over P tokens, `index` holds a key a pool, and `pool[layer]` [slots, 2, P-1, dI] the keys and the gates of
    the tokens whose pool is not whole yet.
    `formats` may keep latents and index keys as records of bytes, and KDA states in bfloat16.
    State pools have `snapshots` more rows behind those of the slots: states that a prefix cache keeps.
    New memory is NaN: whoever reads what nobody wrote must show it; `memory` is one of `pool_memory.KINDS`.
    `layouts` own the memory of the pools that they are named after ("kv", "index", "state" for conv, kda and pool);
    such a pool is an OwnedPool. `prefix`: the workspace of `prefix_tokens` rows that prefixes are gathered into, chunk
    by chunk, where a layer attends to all of them. With `drafts` the draft layer has pools, too, under the number
    behind the last layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        pages: int,
        page: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        snapshots: int = 0,
        memory: str = "",
        layouts: Mapping[str, Any] | None = None,
        drafts: bool = False,
        formats: Formats | None = None,
        prefix_tokens: int = 0,
    ) -> None:
        i, formats = config.index, formats or Formats()
        check_kind(memory)
        unused_pages, unused_slots = spare(memory)
        pages, slots, seed = pages + unused_pages, slots + unused_slots, seed_of(memory, seed)
        self.page, self.device = page, device
        self.index_page = page if i is None else -(-page // i.pool)  # pages of n tokens have room for their pools
        sizes = {"kv": (pages, page), "index": (pages, self.index_page), "state": (slots + snapshots, 1)}

        def pool(name: str, *row: int, kind: torch.dtype = dtype) -> Tensor | OwnedPool:
            count, size = sizes[name]
            if layouts and name in layouts:
                return OwnedPool.allocate(layouts[name], pages=count, page=size, row=row, dtype=kind, device=device)
            shape = (count, *row) if name == "state" else (count, size, *row)
            return new_pool(shape, dtype=kind, device=device, memory=memory)

        self.pages, self.slots = PagePool(pages, seed), FreeList(slots, seed + 1)
        self.pages.keep_from(unused_pages)
        self.slots.keep_from(unused_slots)
        self.snapshots = FreeList(snapshots, seed + 2, first=slots)
        kinds = list(enumerate(config.every_layer if drafts else config.layers))
        state_type = formats.state_type(dtype)
        rows = {n: formats.kv_row(config, n, dtype) for n, kind in kinds if kind != "kda"}
        self.kv = {n: pool("kv", width, kind=own) for n, (width, own) in rows.items()}
        whole = [rows[n] for n, kind in kinds if kind in ("mla", "gqa")]
        self.prefix = PrefixWorkspace(whole, tokens=prefix_tokens, device=device, memory=memory)
        indexed = [n for n, kind in kinds if kind == "dsa"]
        width, own = formats.index_row(config, dtype) if indexed else (0, dtype)
        self.index = {n: pool("index", width, kind=own) for n in indexed}
        self.pool = {n: pool("state", 2, i.waiting, i.lanes * i.dim) for n in indexed if i.pool > 1}
        k = config.kda
        linear = [n for n, kind in kinds if kind == "kda"]
        self.conv = {n: pool("state", k.conv - 1, 3 * k.heads * k.dim) for n in linear}
        self.kda = {n: pool("state", k.heads, k.dim, k.dim, kind=state_type) for n in linear}

    def states(self) -> tuple[tuple[int, str, Tensor | OwnedPool], ...]:
        """(layer, kind, pool) of every state pool, in the order of the layers."""
        named = [(layer, kind, pool) for kind in STATES for layer, pool in getattr(self, kind).items()]
        return tuple(sorted(named, key=lambda item: item[0]))


class Tenancy:
    """The pages and the slot that one request holds, and after its end the memory of which they were."""

    def __init__(self, caches: Caches) -> None:
        self.caches = caches
        self.table: list[int] = []
        self.slot = caches.slots.take()
        self._generation = [caches.slots.generation[self.slot]]

    def grow(self, positions: int) -> None:
        """Takes pages until `positions` positions fit."""
        pages = self.caches.pages
        while len(self.table) * self.caches.page < positions:
            self.table.append(pages.take())
            self._generation.append(pages.generation[self.table[-1]])

    def adopt(self, pages: list[int]) -> None:
        """Holds pages that others have filled, in the order of the positions; only before any other page."""
        self.caches.pages.hold(pages)
        self.table += pages
        self._generation += [self.caches.pages.generation[page] for page in pages]

    def release(self) -> None:
        """Gives everything back; `pool.release` has counted the pages down before."""
        self.caches.pages.give(self.table)
        self.caches.slots.give([self.slot])

    def intact(self) -> bool:
        """Whether nothing of it has been given to another request since."""
        now = [self.caches.slots.generation[self.slot], *(self.caches.pages.generation[p] for p in self.table)]
        return now == self._generation


class CachePools:
    """Logical rows of the caches of a run, for whoever checks them: `read(layer, kind, request, positions)`."""

    def __init__(self, caches: Caches, tenancies: dict[str, Tenancy]) -> None:
        self._caches, self._tenancies = caches, tenancies

    def read(self, layer: int, kind: str, request: str, positions: list[int]) -> Tensor:
        """Rows [positions, width] of pool `kind` ("kv", "index", "conv", "kda", "pool") of `request` at `layer`.

        A state has no positions: "conv", "kda" and "pool" give it whole, flattened to [1, ...]; pooled index keys have
        the numbers of their pools. Raises Unavailable when the layer has no such pool, the request did not run, or its
        memory has been given to another request since.
        """
        pool = getattr(self._caches, kind, {}).get(layer) if kind in PAGED + STATES else None
        where = f"pools: layer {layer}, {kind}, request {request}"
        if pool is None:
            raise Unavailable("there is no such pool", where=where)
        tenancy = self._tenancies.get(request)
        if tenancy is None:
            raise Unavailable("this request did not run last", where=where)
        if not tenancy.intact():
            raise Unavailable("its pages were given to another request since", where=where, todo="read it earlier")
        if kind in STATES:
            slot = torch.tensor([tenancy.slot], device=self._caches.device)
            return paging.state_load(pool, slots=slot).flatten(1)
        table = torch.tensor([tenancy.table], device=pool.device)
        wanted = torch.tensor([positions], device=pool.device)
        owner = torch.zeros(1, dtype=torch.int64, device=pool.device)
        return paging.gather(pool, table=table, owner=owner, indices=wanted)[0]
