"""Caches. A pool is [pages, page, width]; slot = page_of(table) * page + offset. State pools are [slots, ...]."""

from day0check.contracts.contract import OWNER, Arg, Contract, Result, batch, pool, rows, shared, static

_TABLE = Arg("table", "batch", "batch pages", "int64")
_GATHER = (pool("pool", "pages page width"), _TABLE, OWNER, rows("indices", "rows k", "int32"))


def _write(name: str, what: str) -> Contract:
    return Contract(
        name,
        "move",
        f"writes {what} rows into their slots; slot -1 writes nothing",
        (pool("pool", "pages page width"), rows("value", "rows width"), rows("slots", "rows", "int64")),
        (),
        "reference.cache:write",
        mutates=("pool",),
        after="reference.cache:written",
        hard_inputs=("plain", "page_edge", "last_page", "padding_slot"),
    )


def _gather(name: str, what: str) -> Contract:
    return Contract(
        name,
        "move",
        f"{what} rows at logical positions `indices` of the row's request; index -1 gives zeros",
        _GATHER,
        (Result("y", "rows k width"),),
        "reference.cache:gather",
        hard_inputs=("plain", "page_edge", "last_page", "all_minus_one", "shuffled_table"),
    )


def _tier(name: str, summary: str, written: str, after: str) -> Contract:
    return Contract(
        name,
        "move",
        summary,
        (
            pool("pool", "pages ...", "any"),
            pool("host", "places ...", "any"),
            rows("pages", "n", "int64"),
            rows("places", "n", "int64"),
        ),
        (),
        f"reference.cache:{after.removesuffix('ed')}",
        mutates=(written,),
        after=f"reference.cache:{after}",
        hard_inputs=("plain", "bytes"),
        sites=("kv", "index", "conv", "kda", "pool"),
    )


def _record(name: str, what: str) -> Contract:
    return Contract(
        name,
        "compute",
        f"{what} as its cache gives it back: itself, or what a claimed quantisation of the cache leaves of it",
        (rows("x", "rows width"),),
        (Result("y", "rows width"),),
        "reference.records:record",
        points=("out",),
        hard_inputs=("plain", "outlier_channel"),
    )


CONTRACTS = (
    Contract(
        "kv.slots",
        "exact",
        "flat slot of each row's position through the page table; -1 for a padding row (owner -1)",
        (_TABLE, OWNER, rows("positions", "rows", "int64"), static("page")),
        (Result("slots", "rows", "int64"),),
        "reference.cache:slots",
        hard_inputs=("plain", "page_edge", "last_page", "padding_row"),
    ),
    _write("kv.write", "latent"),
    _gather("kv.gather", "latent"),
    Contract(
        "prefix.gather",
        "move",
        "a chunk of each request's latent rows, at logical positions `indices`, in the prefix workspace; index -1 "
        "gives zeros",
        (*_GATHER, pool("out", "rows k width", optional=True)),
        (Result("y", "rows k width"),),
        "reference.cache:gather_chunk",
        hard_inputs=("plain", "page_edge", "last_page", "all_minus_one", "shuffled_table"),
    ),
    _write("index.write", "index-key"),
    _gather("index.gather", "index-key"),
    Contract(
        "state.load",
        "move",
        "state of each request from its slot; slot -1 gives a fresh (zero) state",
        (pool("pool", "slots ...", "any"), batch("slots", "batch", "int64")),
        (Result("state", "batch ...", "any", rows="batch"),),
        "reference.cache:state_load",
        hard_inputs=("plain", "fresh"),
        sites=("conv", "kda", "pool"),
    ),
    Contract(
        "state.store",
        "move",
        "writes the state of each request into its slot",
        (pool("pool", "slots ...", "any"), batch("value", "batch ...", "any"), batch("slots", "batch", "int64")),
        (),
        "reference.cache:state_store",
        mutates=("pool",),
        after="reference.cache:state_stored",
        hard_inputs=("plain",),
        sites=("conv", "kda", "pool"),
    ),
    _tier("kv.offload", "copies pages of the device, or rows of states, to places of the host", "host", "offloaded"),
    _tier(
        "kv.reload", "copies places of the host back into pages of the device, or rows of states", "pool", "reloaded"
    ),
    Contract(
        "kv.copy",
        "move",
        "copies whole pages to other pages of the same pool, before one of several holders writes on (copy on write)",
        (pool("pool", "pages ...", "any"), rows("pages", "n", "int64"), rows("into", "n", "int64")),
        (),
        "reference.cache:copy",
        mutates=("pool",),
        after="reference.cache:copied",
        hard_inputs=("plain", "bytes"),
        sites=("kv", "index"),
    ),
    Contract(
        "kv.rewrite",
        "move",
        "writes whole pages again whose content stays what it is: codes at another scale",
        (pool("pool", "pages ...", "any"), rows("value", "n ...", "any"), rows("pages", "n", "int64")),
        (),
        "reference.cache:rewrite",
        mutates=("pool",),
        after="reference.cache:rewritten",
        hard_inputs=("plain", "bytes"),
        sites=("kv", "index"),
    ),
    _record("kv.record", "a latent"),
    _record("index.record", "an index key"),
    Contract(
        "kv.quantise",
        "exact",
        "plain E4M3 codes of latent rows at the scale that the checkpoint gives: nearest, saturated beyond 448 scales",
        (rows("x", "rows width"), shared("scale", "1", "float32")),
        (Result("codes", "rows width", "float8_e4m3fn"),),
        "reference.records:quantise",
        hard_inputs=("plain", "outlier_channel"),
    ),
    Contract(
        "kv.dequantise",
        "compute",
        "values of plain E4M3 codes: each times the scale",
        (rows("codes", "rows ... width", "float8_e4m3fn"), shared("scale", "1", "float32")),
        (Result("y", "rows ... width", "bfloat16"),),
        "reference.records:dequantise",
        points=("out",),
        hard_inputs=("plain",),
    ),
    Contract(
        "kv.pack",
        "exact",
        "the bytes of a record: E4M3 codes, float32 scales per 128 of them, a bfloat16 rest (656 bytes for 512 codes "
        "and 64 values, 132 for an index key of 128)",
        (
            rows("codes", "rows c", "float8_e4m3fn"),
            rows("scale", "rows c/128 rounded up", "float32"),
            rows("rest", "rows r", "bfloat16"),
        ),
        (Result("record", "rows bytes", "uint8"),),
        "reference.records:pack",
        hard_inputs=("plain", "index_key", "uneven"),
        sites=("kv", "index"),
    ),
    Contract(
        "kv.unpack",
        "compute",
        "the values of records with `width` codes: each code times its scale, then the rest",
        (rows("record", "rows ... bytes", "uint8"), static("width")),
        (Result("y", "rows ... width+r", "bfloat16"),),
        "reference.records:unpack",
        points=("out",),
        hard_inputs=("plain", "index_key", "uneven"),
        sites=("kv", "index"),
    ),
)
