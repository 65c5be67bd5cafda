"""The hard inputs that the contracts name: small shapes on which ordinary data would hide a fault.

`generate(contract, name, seed, dtype)` makes one call's arguments. Generators live in one file per group of families;
each takes a `Draw` and the input's name. Values are drawn on the CPU, so they are the same for every device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from day0check.contracts.contract import Contract

OUTLIER = 40.0  # how much larger an outlier channel is
OUTLIER_EVERY = 29  # channels from one to the next


@dataclass(frozen=True)
class HardInput:
    """Arguments of one call; `site` is the input's name, so that every input has a tap of its own."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    site: str


class Draw:
    """Seeded draws of test values. `dtype` is the activation type; float32 and integers have draws of their own."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, torch.device(device)

    def raw(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Float32 normal values on the CPU, to be shaped further."""
        return torch.randn(*shape, generator=self.generator) * scale

    def act(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return self.to(self.raw(*shape, scale=scale))

    def float32(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return self.raw(*shape, scale=scale).to(self.device)

    def weight(self, out: int, width: int) -> torch.Tensor:
        """A weight [out, in] of deviation in^-1/2."""
        return self.act(out, width, scale=width**-0.5)

    def norm_weight(self, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (1 + 0.2 * self.raw(width)).to(self.dtype if dtype is None else dtype).to(self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """int64 in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def shuffled(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self.generator).to(self.device)

    def to(self, values: torch.Tensor) -> torch.Tensor:
        """Values in the activation type on the device."""
        return values.to(self.dtype).to(self.device)

    def whole(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def rows(self, name: str, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Rows [rows, ..., width] shaped by the name of a hard input; other names give plain normal rows."""
        if name == "one_row":
            shape = (1, *shape[1:])
        x = self.raw(*shape, scale=scale)
        if name == "outlier_channel":
            x[..., 3::OUTLIER_EVERY] *= OUTLIER
        elif name == "uneven_rows":
            x *= torch.exp2(torch.arange(shape[0]) % 13 - 6.0).reshape(-1, *[1] * (x.dim() - 1))
        elif name == "small_values":
            x *= 2.0**-60
        elif name == "small_norm_row":
            x[shape[0] // 2] *= 1e-3
        elif name == "zero_row":
            x[shape[0] // 2] = 0
        return self.to(x)


Generator = Callable[[Draw, str], tuple[Any, dict[str, Any]]]


def _generators() -> dict[str, Generator]:
    from day0check.contracts import (
        hard_inputs_attention,
        hard_inputs_comm,
        hard_inputs_families,
        hard_inputs_moe,
        hard_inputs_prefix,
        hard_inputs_spine,
        hard_inputs_variants,
        hard_inputs_vision,
    )

    rooms = (
        hard_inputs_spine,
        hard_inputs_attention,
        hard_inputs_moe,
        hard_inputs_vision,
        hard_inputs_families,
        hard_inputs_prefix,
        hard_inputs_comm,
        hard_inputs_variants,
    )
    return {operator: g for room in rooms for operator, g in room.GENERATORS.items()}


def generate(
    contract: Contract, name: str, seed: int, dtype: torch.dtype, *, device: torch.device | str = "cpu"
) -> HardInput:
    """The hard input `name` of a contract, in activation type `dtype`; the same for the same seed.

    Raises KeyError when the contract does not list the name or nothing generates it.
    """
    if name not in contract.hard_inputs:
        raise KeyError(f"{contract.name} lists no hard input {name!r}")
    text = f"{contract.name}/{name}/{seed}"
    own_seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")
    first, kwargs = _generators()[contract.name](Draw(own_seed, dtype, device), name)
    return HardInput(name, (first,), kwargs, name)
