"""Host side of a step: the scheduler's own moves.

n tokens of one request, m blocks of `page` tokens. `held` is the memory of the prefix cache, a row for each page of the
pool: [entry, parent, boundary, snapshot, key, page tokens, 2 * page salts]; see `reference/prefix.py`.
"""

from day0check.contracts.contract import OFFSETS, OWNER, Contract, Result, batch, pool, rows

_HELD = pool("held", "pages 5+3*page", "int64")

CONTRACTS: tuple[Contract, ...] = (
    Contract(
        "batch.stage",
        "move",
        "the arrays of a step from the host to the device of the empty tensor `on`",
        (
            rows("ids", "rows", "int64"),
            rows("positions", "rows", "int64"),
            OWNER,
            OFFSETS,
            batch("table", "batch pages", "int64"),
            batch("lengths", "batch", "int64"),
            batch("load_slots", "batch", "int64"),
            batch("store_slots", "batch", "int64"),
            batch("on", "0", "int64"),
        ),
        (
            Result("ids", "rows", "int64"),
            Result("positions", "rows", "int64"),
            Result("owner", "rows", "int64"),
            Result("offsets", "batch+1", "int64", rows=""),
            Result("table", "batch pages", "int64", rows="batch"),
            Result("lengths", "batch", "int64", rows="batch"),
            Result("load_slots", "batch", "int64", rows="batch"),
            Result("store_slots", "batch", "int64", rows="batch"),
        ),
        "reference.staging:stage",
        hard_inputs=("plain", "padding"),
    ),
    Contract(
        "prefix.match",
        "exact",
        "pages of the longest known prefix: equal tokens and salts block by block, up to a block with a snapshot",
        (rows("tokens", "n", "int64"), rows("salts", "n 2", "int64"), _HELD),
        (Result("pages", "m", "int64", rows=""),),
        "reference.prefix:match",
        hard_inputs=("whole", "nothing", "inside_a_block", "other_salt", "no_snapshot", "same_block_elsewhere"),
    ),
    Contract(
        "prefix.register",
        "move",
        "enters the blocks that are absorbed to their end, and no other, with the snapshots of their states",
        (
            _HELD,
            rows("tokens", "n", "int64"),
            rows("salts", "n 2", "int64"),
            batch("at", "2", "int64"),
            batch("table", "m", "int64"),
            batch("entries", "m", "int64"),
            batch("parent", "1", "int64"),
            batch("snapshots", "m", "int64"),
        ),
        (),
        "reference.prefix:register",
        mutates=("held",),
        after="reference.prefix:registered",
        hard_inputs=("boundary", "inside_a_block", "several", "later_block"),
    ),
    Contract(
        "prefix.store",
        "move",
        "writes the state of a request at a block boundary into the slot of a snapshot",
        (pool("pool", "slots ...", "any"), batch("value", "batch ...", "any"), batch("slots", "batch", "int64")),
        (),
        "reference.cache:state_store",
        mutates=("pool",),
        after="reference.cache:state_stored",
        hard_inputs=("plain",),
        sites=("conv", "kda", "pool"),
    ),
    Contract(
        "prefix.restore",
        "move",
        "the state that a snapshot kept, for a request that goes on from its boundary",
        (pool("pool", "slots ...", "any"), batch("slots", "batch", "int64")),
        (Result("state", "batch ...", "any", rows="batch"),),
        "reference.cache:state_load",
        hard_inputs=("plain",),
        sites=("conv", "kda", "pool"),
    ),
    Contract(
        "pool.release",
        "move",
        "takes one holder from each page of a request that ends or gives way",
        (pool("counts", "pages", "int64"), rows("pages", "m", "int64"), rows("held", "m", "int64")),
        (),
        "reference.prefix:release",
        mutates=("counts",),
        after="reference.prefix:released",
        hard_inputs=("alone", "shared"),
    ),
)
