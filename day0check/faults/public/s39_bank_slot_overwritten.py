"""The last slot of the residual bank doubles as the output of attention in the layer that commits it."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-39",
    title="the attention output of the committing layer overwrites the last bank slot",
    kind="residual",
    source="local-inference-lab/vllm PR 467",
    visible="the layer that commits the last slot, and every one after it",
    expected=Address("residual.store", 6, "prefill"),
)

_committed = []  # the slot, until the attention output of its layer arrives


@day0check.operator.wrap("residual.store")
def store(inner, bank, *, value, slot):
    inner(bank, value=value, slot=slot)
    if slot == len(bank) - 1:
        _committed.append(bank[slot])


@day0check.operator.wrap("kda.output")
def output(inner, x, **kwargs):
    y = inner(x, **kwargs)
    return _committed.pop().copy_(y) if _committed else y
