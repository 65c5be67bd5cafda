"""Operators of single switches of a model that only some releases have: rotary positions with three axes."""

from day0check.contracts.contract import Contract, Result, rows, static

CONTRACTS = (
    Contract(
        "rope.positions",
        "exact",
        "temporal, height and width position of every token of a request from its first on; rows of an image end "
        "with a break",
        (rows("ids", "rows", "int64"), static("media_pad"), static("row_break")),
        (Result("positions", "rows 3", "int64"),),
        "reference.rope:rope_positions",
        hard_inputs=("no_image", "two_images", "last_row_open", "one_column"),
    ),
)
