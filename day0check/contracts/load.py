"""Loading: E experts, A active experts, N output rows, K input columns (K/2 bytes of packed codes, K/32 scales)."""

from day0check.contracts.contract import Contract, Result, pool, shared, static

CONTRACTS = (
    Contract(
        "weights.read",
        "move",
        "bytes of one tensor of a checkpoint",
        (static("name"), static("file")),
        (Result("tensor", "any", "any", rows=""),),
        "reference.weights:read_tensor",
    ),
    Contract(
        "weights.place",
        "move",
        "a stored tensor where the engine keeps it: shard, transpose, tie or stack",
        (shared("tensor", "any", "any"), static("transpose", optional=True)),
        (Result("placed", "any", "any", rows=""),),
        "reference.weights:place_tensor",
    ),
    Contract(
        "moe.convert",
        "exact",
        "MXFP4 codes of the active experts as E4M3 payload and float32 block scales, in the shared workspace; "
        "payload * scale equals the MXFP4 value exactly, or the element is counted in `inexact`",
        (
            shared("packed", "E N K/2", "uint8"),
            shared("scale", "E N K/32", "uint8"),
            shared("experts", "A", "int64"),
            pool("payload_out", "A N K", "float8_e4m3fn", optional=True),
            pool("scale_out", "A N K/128 rounded up", "float32", optional=True),
        ),
        (
            Result("payload", "A N K", "float8_e4m3fn", rows=""),
            Result("block_scale", "A N K/128 rounded up", "float32", rows=""),
            Result("inexact", "1", "int64", rows=""),
        ),
        "reference.moe:convert_experts",
        hard_inputs=("every_code", "every_scale", "spread_14", "spread_15", "one_expert"),
        sites=("w1", "w3", "w2"),
    ),
)
