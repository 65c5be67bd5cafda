"""A fused cache write takes the block that straddles latent and rotary part for rotary only."""

import day0check
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-09",
    title="the block that straddles latent and rotary part is written from the wrong side",
    kind="cache",
    source="sglang PR 15522",
    visible="the columns just before the seam, in every row",
    expected=Address("kv.write", 3, "prefill"),
)
LATENT, BLOCK = 32, 12  # columns of the latent, and of one block of the writing kernel


@day0check.operator.wrap("kv.write")
def write(inner, pool, *, value, slots):
    """The rotary buffer is read before its row's begin: at the end of the row before."""
    straddling = LATENT // BLOCK * BLOCK
    wrong = value.clone()
    wrong[:, straddling:LATENT] = value.roll(1, 0)[:, straddling - LATENT :]
    return inner(pool, value=wrong, slots=slots)
