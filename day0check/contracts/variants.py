"""Operators of single switches that only some models have (rotary positions with three axes, grouped queries), and of
the recorder itself.

H query heads, Hk key heads that divide them, n keys, d and dv query and value dims.
"""

from day0check.contracts.contract import (
    OWNER,
    Arg,
    Contract,
    Direction,
    Form,
    Result,
    batch,
    linear,
    rows,
    static,
)

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
    linear("gqa.project", "query, key and value projections", sites=("q", "k", "v")),
    Contract(
        "gqa.attention",
        "compute",
        "causal attention of each row on the first `visible` keys of its own request, H / Hk query heads to a key; "
        "zero for a row that sees none",
        (
            rows("q", "rows H d"),
            batch("keys", "batch n Hk d"),
            batch("values", "batch n Hk dv"),
            OWNER,
            Arg("visible", "rows", "rows", "int64"),
            static("scale"),
        ),
        (Result("y", "rows H dv"),),
        "reference.grouped:grouped_attention",
        points=("s", "p", "out"),
        forms=(Form("flash", ("p", "out")), Form("eager", ("s", "p", "out")), Form("float32_p", ("out",))),
        hard_inputs=("plain", "sharp", "one_key", "no_key", "page_edge", "ragged"),
        directions=(Direction("scale", "softmax scale", per_head=True),),
    ),
    linear("gqa.output", "output projection"),
    Contract(
        "capture.tap",
        "move",
        "what is kept of a result that others read: the bytes that the next operator receives",
        (rows("x", "rows ..."),),
        (Result("y", "rows ..."),),
        "reference.capture:tap",
        hard_inputs=("plain",),
    ),
)
