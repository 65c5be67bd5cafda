"""One row of the latent cache is written 2% too large."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-31",
    title="one cached row times 1.02",
    kind="cache",
    visible="one row of the cache",
    expected=Address("kv.write", 3, "prefill", position=33),
)

ROW = 33


@day0check.operator.wrap("kv.write", phase="prefill")
def write(inner, pool, *, value, slots):
    value = value.clone()
    value[ROW] *= 1.02
    return inner(pool, value=value, slots=slots)
