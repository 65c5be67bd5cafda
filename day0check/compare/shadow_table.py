"""What was written into each slot of one pool: whose content it is, the digest of its bytes, and when that was."""

from __future__ import annotations

from typing import NamedTuple

import torch

from day0check.probe.digest import row_digests
from day0check.probe.registry import OwnedPool

NEVER = -1
DIGESTED_AT_ONCE = 4096  # rows: what they are expanded to stays small beside the pool


class Written(NamedTuple):
    """Columns int64 [n], one entry a slot. `order`: execution index of the write, NEVER where there was none; `seen`:
    that of the latest call at which the bytes were right; `life`: number of the request that wrote, from its admission
    to the release of its memory; `tap`: number of the write's tap."""

    digest: torch.Tensor
    identity: torch.Tensor
    life: torch.Tensor
    position: torch.Tensor
    order: torch.Tensor
    seen: torch.Tensor
    tap: torch.Tensor


class ShadowTable:
    """The shadow of one pool. Slots are flat (page * page size + place; a state pool has one a request)."""

    def __init__(self) -> None:
        self._columns = torch.empty(len(Written._fields), 0, dtype=torch.int64)
        self._log: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # identity, digest, life of every write
        self.writes = 0

    def put(self, slots: torch.Tensor, written: Written) -> None:
        """Remembers what was written into `slots` int64 [n], the last one of equal slots."""
        if not len(slots):
            return
        self._grow(int(slots.max()) + 1)
        self._columns[:, slots] = torch.stack(written)
        self._log.append((written.identity, written.digest, written.life))
        self.writes += 1

    def get(self, slots: torch.Tensor) -> Written:
        """What is known of `slots` int64 [n]."""
        if len(slots):
            self._grow(int(slots.max()) + 1)
        return Written(*self._columns[:, slots])

    def right(self, slots: torch.Tensor, order: int) -> None:
        """The bytes of `slots` were right at the call with execution index `order`."""
        self._columns[Written._fields.index("seen"), slots] = order

    def is_copy(self, identity: int, digest: int, life: int) -> bool:
        """Whether bytes with this digest were ever written for `identity`, and `life` has not itself written others
        since: a page that was copied by means that nobody showed."""
        found = False
        for identities, digests, lives in reversed(self._log):
            at = (identities == identity).nonzero().flatten()
            if not len(at):
                continue
            own = at[lives[at] == life]
            if len(own):
                return int(digests[own[-1]]) == digest
            found = found or bool((digests[at] == digest).any())
        return found

    def _grow(self, size: int) -> None:
        have = self._columns.shape[1]
        if size > have:
            more = torch.full((len(Written._fields), max(size, 2 * have) - have), NEVER, dtype=torch.int64)
            self._columns = torch.cat((self._columns, more), 1)


def slot_digests(pool: torch.Tensor | OwnedPool, slots: torch.Tensor, *, paged: bool) -> torch.Tensor:
    """int64 [n] on the host: digests of the rows at `slots` int64 [n], none negative, of a pool [pages, page, ...], or
    [slots, ...] where it is not `paged`. Raises what a layout raises."""
    parts = [_digests(pool, some, paged) for some in slots.split(DIGESTED_AT_ONCE)] if len(slots) else []
    return torch.cat(parts).cpu() if parts else torch.empty(0, dtype=torch.int64)


def row_digests_of(rows: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """int64 [n] on the host: digests of the rows `at` int64 [n] of [rows, ...]."""
    narrow = rows.dtype.is_floating_point and rows.element_size() == 1
    return row_digests((rows.view(torch.uint8) if narrow else rows)[at]).cpu()


def page_size(pool: torch.Tensor | OwnedPool) -> int:
    return pool.page if isinstance(pool, OwnedPool) else pool.shape[1]


def _digests(pool: torch.Tensor | OwnedPool, slots: torch.Tensor, paged: bool) -> torch.Tensor:
    if isinstance(pool, OwnedPool):
        return row_digests(pool.read(slots.to(pool.device)))
    narrow = pool.dtype.is_floating_point and pool.element_size() == 1
    raw, at = pool.view(torch.uint8) if narrow else pool, slots.to(pool.device)
    if not paged:
        return row_digests(raw[at])
    return row_digests(raw[at.div(pool.shape[1], rounding_mode="floor"), at % pool.shape[1]])
