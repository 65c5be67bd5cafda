"""Hard inputs of single switches: sequences with images in rows, key heads that several query heads share."""

from __future__ import annotations

from typing import Any

from day0check.contracts.hard_inputs import Draw, Generator
from day0check.contracts.hard_inputs_attention import PAGE, ROWS, batches
from day0check.contracts.hard_inputs_spine import linear

PAD, BREAK = 300, 301
Arguments = tuple[Any, dict[str, Any]]


def _positions(d: Draw, name: str) -> Arguments:
    """Text around images of (rows, columns); `last_row_open`: the sequence so far ends inside an image."""
    grids = {"no_image": (), "one_column": ((5, 1), (1, 1)), "last_row_open": ((2, 3), (4, 2))}.get(
        name, ((3, 5), (6, 2))
    )
    tokens = d.integers(0, 256, 5).tolist()
    for rows, columns in grids:
        tokens += ([PAD] * columns + [BREAK]) * rows
        tokens += d.integers(0, 256, 4).tolist()
    if name == "last_row_open":
        tokens = tokens[:-6]
    return d.whole(tokens), {"media_pad": PAD, "row_break": BREAK}


def _grouped(d: Draw, name: str) -> Arguments:
    keys, width = 4 * PAGE + 1, 16
    requests, owner, visible = batches(d, name, keys)
    return d.act(ROWS, 6, width), {
        "keys": d.act(requests, keys, 2, width),
        "values": d.act(requests, keys, 2, width),
        "owner": owner,
        "visible": visible,
        "scale": (12.0 if name == "sharp" else 1.0) * width**-0.5,
    }


GENERATORS: dict[str, Generator] = {
    "rope.positions": _positions,
    "gqa.project": linear,
    "gqa.attention": _grouped,
    "gqa.output": linear,
    "capture.tap": lambda d, name: (d.act(ROWS, 64), {}),
}
