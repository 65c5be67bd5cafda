"""Hard inputs of sums over ranks."""

from __future__ import annotations

from typing import Any

import torch

from day0check.contracts.hard_inputs import Draw, Generator

ROWS, RANKS, WIDTH = 37, 4, 96
Arguments = tuple[Any, dict[str, Any]]


def _sum_of_parts(d: Draw, name: str) -> Arguments:
    if name == "one_rank":
        return d.act(ROWS, 1, WIDTH), {}
    if name != "cancellation":
        return d.rows(name, ROWS, RANKS, WIDTH), {}
    first = d.raw(ROWS, 1, WIDTH) * torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    return d.to(first * (1 + 2.0**-6 * d.raw(ROWS, RANKS, 1))), {}


GENERATORS: dict[str, Generator] = {"comm.all_reduce": _sum_of_parts, "comm.reduce_scatter": _sum_of_parts}
