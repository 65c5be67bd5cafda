"""The scheduler names the slot of a request's old state when it is computed again after a preemption."""

from dataclasses import replace

import torch

from day0check.accelerated import scheduler
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-103",
    title="a preempted request begins again from the slot of its old state",
    kind="linear-attention",
    visible="after a preemption alone",
    expected=Address("state.load", 0, "prefill", request="a", position=0),
    case="preempt",
)


class Candidate(Accelerated):
    """The engine whose batches load the state of every request that had one, whether or not it begins here."""

    def run(self, requests, schedule, recorder):
        plain, seen = scheduler.make_batch, set()

        def make_batch(phase, parts, **kwargs):
            batch = plain(phase, parts, **kwargs)
            old = torch.tensor([part.request in seen for part in parts])
            seen.update(part.request for part in parts)
            return replace(batch, load_slots=torch.where(old, batch.store_slots, batch.load_slots))

        scheduler.make_batch = make_batch
        try:
            return super().run(requests, schedule, recorder)
        finally:
            scheduler.make_batch = plain
