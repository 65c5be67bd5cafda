"""Loading moves of the fast path."""

from __future__ import annotations

import os

from safetensors import safe_open
from torch import Tensor


def read(name: str, *, file: str | os.PathLike[str]) -> Tensor:
    """The tensor stored as `name` in the safetensors `file`, on the CPU, in its stored type."""
    with safe_open(os.fspath(file), framework="pt") as opened:
        return opened.get_tensor(name)


def place(tensor: Tensor, *, transpose: bool | None = None) -> Tensor:
    """`tensor` where the engine keeps it: contiguous, with its last two axes swapped when `transpose`."""
    return tensor.mT.contiguous() if transpose else tensor.contiguous()
