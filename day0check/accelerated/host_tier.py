"""The host tier: pages and states of interrupted requests, kept in host memory and brought back byte for byte.

Copies are asynchronous where the device has streams: host memory is pinned, copies run on a stream of their own, and a
page or slot that is read or taken again waits for them. A request whose memory is on its way back rests for one step.

For a run that looks for memory that nobody waits for, copies are made late: on a device with streams theirs rests
first, elsewhere they stand in line, as on a stream, until one of them is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from day0check.accelerated.cache import PAGED, STATES, Caches, FreeList, Tenancy
from day0check.accelerated.staging import LATE_CYCLES
from day0check.probe.recorder import Caller
from day0check.probe.registry import OwnedPool
from day0check.probe.rows import RowMap

if TYPE_CHECKING:
    from day0check.accelerated.scheduler import Running


@dataclass(frozen=True)
class _Turn:
    """What a request waits for whose memory comes back by a late copy that stands in line."""

    tier: HostTier
    copy: Callable[[], None]

    def wait(self) -> None:
        self.tier.make(self.copy)


@dataclass(frozen=True)
class Parked:
    """Where the memory of one request lies: host pages in the order of its positions, and the slot of its states."""

    pages: tuple[int, ...]
    slot: int
    positions: int


class HostTier:
    """`pages` host pages for every paged pool and `slots` rows for every state pool (as many as the device has).
    `moment`: when copies are made, one of `staging.MOMENTS`. `settle` is to be called before the device is told
    anything that may touch memory which left."""

    def __init__(self, caches: Caches, *, pages: int, moment: str = "") -> None:
        self.caches, self.moment = caches, moment
        self._line: deque[Callable[[], None]] = deque()  # late copies, where there is no stream to be late
        self._due = 0  # how many of them are to be made before the device is told anything else
        self.pages, self.slots = FreeList(pages), FreeList(caches.slots.size)
        self.moved_bytes = 0  # in both directions
        self._stream = torch.cuda.Stream(caches.device) if caches.device.type == "cuda" else None
        self._host = {
            (kind, layer): self._like(pool, pages if kind in PAGED else caches.slots.size)
            for kind in PAGED + STATES
            for layer, pool in getattr(caches, kind).items()
        }

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self._host.values())

    def room(self, tenancy: Tenancy) -> bool:
        return len(self.pages) >= len(tenancy.table) and len(self.slots) > 0

    def park(self, caller: Caller, running: Running, *, step: int) -> Parked:
        """Copies everything that a request holds; it may give it back afterwards."""
        table = running.tenancy.table
        parked = Parked(tuple(self.pages.take() for _ in table), self.slots.take(), running.computed)
        copy = partial(self._move, "kv.offload", caller, running, parked, running.tenancy, step)
        if self._in_line:
            self._line.append(copy)
            self._due = len(self._line)
        else:
            copy()
        return parked

    def fetch(self, caller: Caller, running: Running, *, step: int) -> None:
        """Begins to copy what was parked into the pages and the slot that the request has now, and frees the host's.

        `running.landing` is to be waited for before the first row is computed on them.
        """
        copy = partial(self._move, "kv.reload", caller, running, running.parked, running.tenancy, step)
        if self._in_line:
            self._line.append(copy)
            running.landing = _Turn(self, copy)
        else:
            copy()
        self.drop(running.parked)

    def settle(self) -> None:
        """Makes the late copies out of memory that is no longer its request's."""
        while self._due:
            self._next()

    @property
    def _in_line(self) -> bool:
        return self.moment == "late" and self._stream is None

    def _next(self) -> None:
        self._due = max(0, self._due - 1)
        self._line.popleft()()

    def make(self, copy: Callable[[], None]) -> None:
        """Makes the late copies up to this one."""
        while copy in self._line:
            self._next()

    def drop(self, parked: Parked) -> None:
        self.pages.give(list(parked.pages))
        self.slots.give([parked.slot])

    def _move(
        self, operator: str, caller: Caller, running: Running, parked: Parked, tenancy: Tenancy, step: int
    ) -> None:
        page, device, name = self.caches.page, self.caches.device, running.request.id
        first = tuple(range(0, len(parked.pages) * page, page))
        paged = RowMap((name,), (0,) * len(first), first)
        state = RowMap((name,), (0,), (parked.positions - 1,))
        table = torch.tensor(tenancy.table[: len(first)], dtype=torch.int64, device=device)
        places = torch.tensor(parked.pages, dtype=torch.int64)
        slot = torch.tensor([tenancy.slot], device=device)
        stays = operator == "kv.offload"  # the pages change hands at once
        with caller.recorder.between(running.phase, paged, step), self._beside(wait=stays) as beside:
            for (kind, layer), host in self._host.items():
                pool, at = getattr(self.caches, kind)[layer], caller.at(f"layers.{layer:02d}")
                if kind in PAGED:
                    at(operator, pool, site=kind, host=host, pages=table, places=places)
                else:
                    own = torch.tensor([parked.slot])
                    at(operator, pool, site=kind, row_map=state, host=host, pages=slot, places=own)
                self.moved_bytes += host[0].numel() * host.element_size() * (len(first) if kind in PAGED else 1)
        if self.moment == "at_once" and self._stream is not None:
            self._stream.synchronize()
        if not stays:
            running.landing = beside.event

    def _beside(self, *, wait: bool) -> _Beside:
        return _Beside(self._stream, wait=wait, late=self.moment == "late")

    def _like(self, pool: Tensor | OwnedPool, count: int) -> Tensor:
        owned = isinstance(pool, OwnedPool)
        row = ((pool.page, *pool.row) if pool.page > 1 else pool.row) if owned else tuple(pool.shape[1:])
        return torch.zeros(count, *row, dtype=pool.dtype, pin_memory=self._stream is not None)


class _Beside:
    """Work on a stream of its own that begins after what the device was told before.

    With `wait` later work waits for all of it; otherwise `event` tells when it is done, None without a stream.
    `late`: the device rests first, so that who does not wait is there before it.
    """

    def __init__(self, stream: torch.cuda.Stream | None, *, wait: bool, late: bool) -> None:
        self.stream, self.wait, self.late = stream, wait, late
        self.event: torch.cuda.Event | None = None

    def __enter__(self) -> _Beside:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
            self._context = torch.cuda.stream(self.stream)
            self._context.__enter__()
            if self.late:
                torch.cuda._sleep(LATE_CYCLES)
        return self

    def __exit__(self, *error: object) -> None:
        if self.stream is None:
            return
        self._context.__exit__(*error)
        if self.wait:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
        else:
            self.event = self.stream.record_event()
