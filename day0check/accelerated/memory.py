"""What an engine holds, counted in bytes of storages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def storages(*owners: Any) -> int:
    """Bytes of all storages that tensors of `owners` lie in, each once, whatever shares it.

    Owners are followed through attributes, dataclass fields, mappings, lists and tuples of this package's objects.
    """
    found: dict[int, int] = {}
    for tensor in _tensors(owners, set()):
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner = list(value.values())
    elif isinstance(value, (list, tuple)):
        inner = list(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = [getattr(value, field.name) for field in dataclasses.fields(value)]
    elif type(value).__module__.startswith("day0check.accelerated"):
        inner = list(vars(value).values()) if hasattr(value, "__dict__") else []
    else:
        return
    for one in inner:
        yield from _tensors(one, seen)
