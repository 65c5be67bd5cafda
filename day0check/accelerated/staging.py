"""Input of a step on its way to the device: one queue of copies out of host buffers, and rows of a fixed number.

The scheduler lays a step out on the host. `batch.stage` copies its arrays through a queue: each goes into a host buffer
(pinned where the device wants it), the copies are queued and carried out together, in order. A buffer is written again
only after the copy out of it was carried out.

When a copy that was issued is made is the device's affair. `copies` says when, for a run that looks for buffers that
are written too early: "late" at the last moment that is still legal, where somebody waits for the buffer or for what it
fills, and on a device behind a wait; "at_once" before anything else happens, one after the other, as its control.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from day0check.accelerated.batch import Batch
from day0check.errors import InputError
from day0check.probe.recorder import Caller
from day0check.probe.rows import PADDING, RowMap

DEPTH = 8  # host buffers that are used in turn
MOMENTS = ("", "late", "at_once")  # at which an issued copy is made; "": as soon as the device likes
LATE_CYCLES = 2_000_000  # of a device that waits before late copies: the host is a step ahead by then


class _OfThisThread(threading.local):
    copies: str = ""

    def __init__(self) -> None:
        self.queues: dict[str, StagingQueue] = {}


_OF_THIS_THREAD = _OfThisThread()


@contextlib.contextmanager
def copies(moment: str) -> Iterator[None]:
    """When the queues of this thread make copies that were issued, one of MOMENTS. Raises InputError for another."""
    if moment not in MOMENTS:
        known = ", ".join(repr(m) for m in MOMENTS if m)
        raise InputError(f"no moment {moment!r} of copies", where="schedule.copies", todo=f"use one of {known}")
    before, _OF_THIS_THREAD.copies = _OF_THIS_THREAD.copies, moment
    try:
        yield
    finally:
        _OF_THIS_THREAD.copies = before


class StagingQueue:
    """Copies int64 arrays to `device`. `put` queues a copy and gives the tensor that it will fill, `run` issues what is
    queued, `settle` lets the consumer wait for what was issued. `deferred` False issues each copy at once."""

    def __init__(self, device: torch.device, *, depth: int = DEPTH, deferred: bool = True) -> None:
        self.device, self.deferred = device, deferred
        self._pinned = device.type == "cuda"
        self._buffers = [self._buffer(1024) for _ in range(depth)]
        self._pending: list[tuple[int, Tensor, Tensor]] = []  # (buffer, where to, where from)
        self._issued: list[tuple[int, Tensor, Tensor]] = []  # and not made so far
        self._done: list[torch.Event | None] = [None] * depth
        self._next = 0

    def put(self, values: Tensor) -> Tensor:
        number = self._next
        self._next = (number + 1) % len(self._buffers)
        self.free(number)
        if self._buffers[number].numel() < values.numel():
            self._buffers[number] = self._buffer(2 * values.numel())
        host = self._buffers[number][: values.numel()].view(values.shape)
        host.copy_(values)
        there = torch.empty(values.shape, dtype=torch.int64, device=self.device)
        self._pending.append((number, there, host))
        if _OF_THIS_THREAD.copies == "at_once":
            self.run()
            self._wait(number)
        elif not self.deferred:
            self.run()
        return there

    def run(self) -> None:
        self._issued += self._pending
        self._pending.clear()
        if _OF_THIS_THREAD.copies != "late":
            self.settle()

    def settle(self) -> None:
        """Makes the copies that were issued."""
        if self._issued and self._pinned and _OF_THIS_THREAD.copies == "late":
            torch.cuda._sleep(LATE_CYCLES)
        for number, there, host in self._issued:
            there.copy_(host, non_blocking=self._pinned)
            if self._pinned:
                self._done[number] = torch.accelerator.current_stream(self.device).record_event()
        self._issued.clear()

    def free(self, number: int) -> None:
        """Makes sure that the copy out of a host buffer was carried out."""
        if any(waiting == number for waiting, *_ in (*self._pending, *self._issued)):
            self.run()
            self.settle()
        self._wait(number)

    def _wait(self, number: int) -> None:
        if (done := self._done[number]) is not None:
            done.synchronize()
            self._done[number] = None

    def _buffer(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int64, pin_memory=self._pinned)


def queue_of(device: torch.device) -> StagingQueue:
    """The one queue of a device in the calling thread: two engines of one process must not share host buffers."""
    queues = _OF_THIS_THREAD.queues
    if str(device) not in queues:
        queues[str(device)] = StagingQueue(device)
    return queues[str(device)]


ARRAYS = ("ids", "positions", "owner", "offsets", "table", "lengths", "load_slots", "store_slots")


def stage(
    ids: Tensor,
    *,
    positions: Tensor,
    owner: Tensor,
    offsets: Tensor,
    table: Tensor,
    lengths: Tensor,
    load_slots: Tensor,
    store_slots: Tensor,
    on: Tensor,
) -> tuple[Tensor, ...]:
    """The arrays of a step, int64 on the host, on the device of the empty tensor `on`, in the order given."""
    return stage_through(queue_of(on.device), ids, positions, owner, offsets, table, lengths, load_slots, store_slots)


def stage_through(queue: StagingQueue, *arrays: Tensor) -> tuple[Tensor, ...]:
    """Copies of `arrays`, issued together after all of them were queued; with what is given here a step is computed."""
    there = tuple(queue.put(array) for array in arrays)
    queue.run()
    queue.settle()
    return there


def staged(caller: Caller, batch: Batch, device: torch.device) -> Batch:
    """`batch`, laid out on the host, on `device`: what a step computes with went through `batch.stage`."""
    lengths = torch.tensor([part.start + len(part.tokens) for part in batch.parts])
    host = {name: getattr(batch, name) for name in ARRAYS if name != "lengths"} | {"lengths": lengths}
    first, *others = ARRAYS
    on = torch.empty(0, dtype=torch.int64, device=device)
    given = {name: host[name] for name in others}
    there = dict(zip(ARRAYS, caller.at("")("batch.stage", host[first], **given, on=on), strict=True))
    places = torch.arange(batch.history.shape[1], device=device)
    history = torch.where(places < there.pop("lengths").unsqueeze(1), places, -1)
    every = torch.arange(len(batch.parts), device=device)
    return replace(batch, **there, visible=there["positions"] + 1, every=every, history=history)


class FixedRows:
    """Pads decode steps to `count` rows, as the replay of a captured graph does.

    A padding row belongs to no request and keeps the token and the position that the last step to use it left there.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._ids, self._positions = [0] * count, [0] * count

    def pad(self, batch: Batch) -> Batch:
        """`batch`, on the host, with padding rows behind its own; a longer one as it is."""
        real = len(batch.rows)
        keep = min(real, self.count)
        self._ids[:keep], self._positions[:keep] = batch.ids[:keep].tolist(), batch.positions[:keep].tolist()
        if batch.phase != "decode" or real >= self.count:
            return batch
        stale = self._positions[real:]
        rows = RowMap(
            batch.rows.requests,
            (*batch.rows.owner, *[PADDING] * len(stale)),
            (*batch.rows.position, *stale),
        )
        positions = torch.tensor(self._positions)
        return replace(
            batch,
            rows=rows,
            ids=torch.tensor(self._ids),
            positions=positions,
            visible=positions + 1,
            owner=torch.tensor(rows.owner),
        )
