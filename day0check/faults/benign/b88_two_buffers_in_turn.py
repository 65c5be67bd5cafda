"""Copies issued one by one out of two buffers, each taken again only when the copy out of it was made."""

import functools

import day0check
from day0check.accelerated.staging import StagingQueue, stage_through
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-88",
    title="two host buffers in turn, each waited for",
    kind="memory",
    visible="nowhere",
    expected=None,
    case="copies",
)


@functools.lru_cache(maxsize=1)
def _queue(device):
    return StagingQueue(device, depth=2, deferred=False)


@day0check.operator("batch.stage")
def stage(ids, *, positions, owner, offsets, table, lengths, load_slots, store_slots, on):
    arrays = (ids, positions, owner, offsets, table, lengths, load_slots, store_slots)
    return stage_through(_queue(on.device), *arrays)
