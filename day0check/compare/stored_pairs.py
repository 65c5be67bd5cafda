"""Statistics of two dumps in safetensors files, tensor by tensor and a slice of rows at a time: bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from day0check.compare.pair_statistics import PairStatistics, joined, pair_statistics
from day0check.errors import InputError

SLICE_BYTES = 2**23  # of each side, or one row where a row is larger


def stored_pairs(own: Path, oracle: Path, *, fast: bool | None = None) -> Iterator[tuple[str, PairStatistics]]:
    """(key, statistics) of every tensor of two files of the same names, in order of the name.

    Tensors [R, ...] of any float dtypes; at most `SLICE_BYTES` of each side are in memory. Raises InputError for a file
    that cannot be read, names that are in one file alone and shapes that differ.
    """
    with _opened(own) as here, _opened(oracle) as there:
        names, others = set(here.keys()), set(there.keys())
        if alone := sorted(names ^ others):
            side, other = (own, oracle) if alone[0] in names else (oracle, own)
            todo = "give two dumps of the same tensors"
            raise InputError(f"tensor {alone[0]!r} is not in {other.name}", where=str(side), todo=todo)
        for key in sorted(names):
            a, b = here.get_slice(key), there.get_slice(key)
            if a.get_shape() != b.get_shape():
                message = f"tensor {key!r} is {a.get_shape()} here and {b.get_shape()} in {oracle.name}"
                raise InputError(message, where=str(own), todo="give two dumps of the same tensors")
            yield key, joined(_parts(a, b, fast))


def _parts(a: Any, b: Any, fast: bool | None) -> Iterator[PairStatistics]:
    shape = a.get_shape()
    if not shape or 0 in shape:
        yield pair_statistics(a[...], b[...], fast=fast)
        return
    row = a[:1].nbytes
    step = max(1, SLICE_BYTES // row)
    for first in range(0, shape[0], step):
        yield pair_statistics(a[first : first + step], b[first : first + step], fast=fast)


def _opened(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt")
    except FileNotFoundError as error:
        raise InputError("there is no such file", where=str(path), todo="give a safetensors file") from error
    except (SafetensorError, OSError) as error:
        raise InputError(f"cannot be read: {error}", where=str(path), todo="write the file again") from error
