"""Weights that a checkpoint stores as codes with scales beside them: block FP8, and INT4 in groups of 32 columns.

What a weight is stored as, the tensors decide and not a declaration: declarations leave out linears that are not
quantised (model.md 6.16).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from reference.formats import FP8_BLOCK, INT4_CODES, INT4_GROUP

BLOCK_FP8 = "F8_E4M3"  # with a float32 scale per block of 128 x 128 beside it
INT4 = "I4"  # eight codes in each I32 word of NAME_packed, with NAME_scale and NAME_shape beside it
SCALES = "_scale_inv"  # of block FP8; multiplied, whatever the name says (model.md 3)
PACKED, GROUP_SCALES, SHAPE = "_packed", "_scale", "_shape"  # of INT4 (compressed-tensors, "pack-quantized")


class Described(Protocol):
    """Anything that says of a stored tensor which dtype (as safetensors spells it) and shape it has; a dataclass."""

    dtype: str
    shape: tuple[int, ...]


Entry = TypeVar("Entry", bound=Any)  # a dataclass that is `Described`


def with_int4(entries: Mapping[str, Entry], *, weights: Collection[str]) -> dict[str, Entry]:
    """The entries, canonical name -> `Described`, in which a matrix of INT4 words stands under the name of its weight,
    with dtype `INT4` and the shape of the weight. Words that are none of `weights`, which the model asks for, or that
    lie beside a plain weight of that name, stay what they are."""
    found = {}
    for name, entry in entries.items():
        weight = name.removesuffix(PACKED)
        if name.endswith(f".weight{PACKED}") and _is_words(entry) and weight in weights and weight not in entries:
            rows, words = entry.shape
            found[weight] = replace(entry, dtype=INT4, shape=(rows, words * INT4_CODES))
        else:
            found[name] = entry
    return found


def _is_words(entry: Described) -> bool:
    return entry.dtype == "I32" and len(entry.shape) == 2


def beside(name: str, entry: Described) -> tuple[str, ...]:
    """Canonical names of what belongs to the codes of weight `name`; () for a weight that is none."""
    if entry.dtype == INT4:
        return f"{name}{GROUP_SCALES}", f"{name}{SHAPE}"
    return (f"{name}{SCALES}",) if entry.dtype == BLOCK_FP8 else ()


def scales_due(entry: Described) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """(dtypes that are read, shape) of the scales of a coded weight."""
    rows, columns = entry.shape[0], entry.shape[-1]
    if entry.dtype == INT4:
        return ("BF16", "F16", "F32"), (rows, columns // INT4_GROUP)
    return ("F32",), tuple(math.ceil(n / FP8_BLOCK) for n in entry.shape)
