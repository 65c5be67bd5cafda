"""How the memory of the pools lies and what it holds before anybody writes: none of it may be seen in a result.

"" is memory full of NaN in shuffled order. "garbage": finite values, which hide in sums where NaN shows. "shuffled":
other pages and slots for the same request. "end": numbers beyond everything that small products reach. "strided":
pools that are views of a larger allocation, so that a row lies where its shape alone does not say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from day0check.errors import InputError

KINDS = ("", "garbage", "shuffled", "end", "strided")
SPARE_PAGES, SPARE_SLOTS = 1024, 8  # that are there and never given out, in memory "end"
_GARBAGE = 240.0  # fits every floating type of a pool
_OTHER_SEED = 7919


def check_kind(memory: str) -> None:
    """Raises InputError for a kind of memory that there is not."""
    if memory not in KINDS:
        known = ", ".join(kind for kind in KINDS if kind)
        raise InputError(f"no kind of memory {memory!r}", where="schedule.memory", todo=f"use one of {known}")


def new_pool(shape: tuple[int, ...], *, dtype: torch.dtype, device: torch.device, memory: str) -> Tensor:
    """A pool of this shape whose first axis counts pages or slots; of bytes, NaN is a pattern that reads as NaN."""
    value = _GARBAGE if memory == "garbage" else float("nan")
    if dtype == torch.uint8:
        value = 0x3C if memory == "garbage" else 0xFF
    if memory == "strided":
        return torch.full((shape[0], 2, *shape[1:]), value, dtype=dtype, device=device)[:, 1]
    return torch.full(shape, value, dtype=dtype, device=device)


def spare(memory: str) -> tuple[int, int]:
    """Pages and slots in front of those that are given out."""
    return (SPARE_PAGES, SPARE_SLOTS) if memory == "end" else (0, 0)


def seed_of(memory: str, seed: int) -> int:
    """The seed of the order in which pages and slots are given out."""
    return seed + _OTHER_SEED if memory == "shuffled" else seed
