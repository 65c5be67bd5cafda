"""A host buffer is rewritten while the copy out of it is still queued: a step reads the numbers of another array."""

import functools

import day0check
from day0check.accelerated.staging import StagingQueue, stage_through
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-75",
    title="the next array is written into a host buffer before its copy was carried out",
    kind="memory",
    source="vllm PR 47644, PR 25279, PR 54269",
    visible="input of a step, under load",
    expected=Address("batch.stage", None, "prefill"),
    differs="one buffer for all arrays of a step, and always",
)


VOCABULARY = 320  # of preset tiny: a healthy step loses no token to the clamp below


class Unguarded(StagingQueue):
    """The staging queue with a single host buffer and nobody who waits for the copies out of it."""

    def free(self, number):
        pass


@functools.lru_cache(maxsize=1)
def _queue(device):
    return Unguarded(device, depth=1)


@day0check.operator("batch.stage")
def stage(ids, *, positions, owner, offsets, table, lengths, load_slots, store_slots, on):
    arrays = (ids, positions, owner, offsets, table, lengths, load_slots, store_slots)
    there = stage_through(_queue(on.device), *arrays)
    # positions and slots that lie outside everything would end the process: only the tokens are let through
    return (there[0].clamp(0, VOCABULARY - 1), *(array.to(on.device) for array in arrays[1:]))
