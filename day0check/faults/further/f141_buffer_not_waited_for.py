"""Copies are issued one by one out of four buffers, and nobody waits before a buffer is taken again: right on a device
that makes every copy at once, wrong on one that is behind."""

import functools

import day0check
from day0check.accelerated.staging import StagingQueue, stage_through
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-141",
    title="a host buffer is taken again while the copy out of it is under way",
    kind="memory",
    visible="copies that are made late",
    expected=Address("batch.stage", None, "prefill"),
    case="copies",
)


VOCABULARY = 320  # of preset tiny: a healthy step loses no token to the clamp below


class Unguarded(StagingQueue):
    """The staging queue with four host buffers and nobody who waits for the copies out of them."""

    def free(self, number):
        pass


@functools.lru_cache(maxsize=1)
def _queue(device):
    return Unguarded(device, depth=4, deferred=False)


@day0check.operator("batch.stage")
def stage(ids, *, positions, owner, offsets, table, lengths, load_slots, store_slots, on):
    arrays = (ids, positions, owner, offsets, table, lengths, load_slots, store_slots)
    there = stage_through(_queue(on.device), *arrays)
    # positions and slots that lie outside everything would end the process: only the tokens are let through
    return (there[0].clamp(0, VOCABULARY - 1), *(array.to(on.device) for array in arrays[1:]))
