"""What the replicates of a case's reference pass say of each travelling tap, kept for runs that are compared later.

The judged run and every further run of the same tokens have the same oracle, and so the same noise: one pass serves
all of them. Kept are factors, never the tensors: n + d numbers of a tap with n rows and d columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from day0check.compare.net_noise import NoiseFactors, noise_factors
from day0check.errors import InputError

FILE = "noise.safetensors"
_SEPARATOR = "|"  # neither a tap nor the id of a request holds it
_PARTS = ("rows", "columns", "floor", "signal", "replicate_z")


@dataclass(frozen=True)
class TapNoise:
    """The noise of one tap over all rows of one request, in order of positions (patches: in their own order).

    `signal` [n]: sums of the oracle's squares. `replicate_z` [R, n]: mean square of each replicate's error over columns
    in units of the map.
    """

    factors: NoiseFactors
    signal: torch.Tensor
    replicate_z: torch.Tensor


class NoiseBook:
    """Noise by (request, tap)."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], TapNoise] = {}

    def add(self, request: str, tap: str, oracle: torch.Tensor, replicates: Sequence[torch.Tensor]) -> None:
        """`oracle` [n, ...] and the same of each replicate, every row of the pass."""
        wide = oracle.flatten(1).double()
        squares = (torch.stack([r.flatten(1).double() for r in replicates]) - wide).nan_to_num().square()
        factors = noise_factors(squares, wide)
        z = (squares / factors.variance()).mean(-1)
        self._found[request, tap] = TapNoise(factors, wide.nan_to_num().square().sum(-1), z)

    def of(self, request: str, tap: str) -> TapNoise | None:
        return self._found.get((request, tap))

    def write(self, path: Path) -> None:
        """Raises OSError when the disk does not take it."""
        tensors = {}
        for key, noise in self._found.items():
            values = (*vars(noise.factors).values(), noise.signal, noise.replicate_z)
            for part, value in zip(_PARTS, values, strict=True):
                tensors[_SEPARATOR.join((*key, part))] = value.cpu().contiguous()
        save_file(tensors, str(path))


def read_noise(path: Path) -> NoiseBook:
    """What `write` left. Raises InputError for a file that is not there or was cut."""
    book, parts = NoiseBook(), {}
    try:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # the file is no mapping
                request, tap, part = name.split(_SEPARATOR)
                parts.setdefault((request, tap), {})[part] = file.get_tensor(name)
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"no noise can be read: {error}", where=str(path), todo="run the case again") from error
    for (request, tap), p in parts.items():
        factors = NoiseFactors(p["rows"], p["columns"], p["floor"])
        book._found[request, tap] = TapNoise(factors, p["signal"], p["replicate_z"])
    return book
