"""What may be wrong in a black box: a parameter of an operator, wherever the model has it or in one layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from day0check.compare.net_measures import layer_of
from day0check.compare.propagated import Forward
from day0check.contracts import CONTRACTS

SIZE = 0.01  # relative change of a parameter
EPSILON = 9.0  # of an eps: the wrong ones are ten times too large, a percent shows nowhere
LARGEST, LARGEST_EPSILON = 0.5, 1000.0  # relative error beyond which one step of a parameter says nothing
FIRST_TOKENS = 24  # that show where a model calls what
# Parameters that a whole model has wrong at once and that a call's own replay sees without a direction.
MODEL_WIDE = (("rope.apply", "theta", "rope theta"),)
# What nobody can tell from an answer: both change the same products.
SAME = {("moe.combine", "weights"): "router weights or routed scale"}


@dataclass(frozen=True)
class Parameter:
    """An argument of an operator, at all `taps` at which a model calls it, in order of execution."""

    operator: str
    argument: str
    words: str
    taps: tuple[str, ...]

    @property
    def size(self) -> float:
        return EPSILON if self.argument == "eps" else SIZE

    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({n for n in map(layer_of, self.taps) if n is not None}))


@dataclass(frozen=True)
class Guess:
    """`parameter` is `parameter.size` (relative) too large, everywhere or in one layer."""

    parameter: Parameter
    layer: int | None

    def touches(self, tap: str) -> bool:
        return tap in self.parameter.taps and (self.layer is None or layer_of(tap) == self.layer)

    def possible(self, amplitude: float) -> bool:
        """Whether so many steps are an error that a parameter can have, and that one step says something of."""
        size = self.parameter.size * amplitude
        return -1 < size <= LARGEST_EPSILON if self.parameter.argument == "eps" else abs(size) <= LARGEST

    def applied(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The keywords of a call with the guess in them."""
        argument = self.parameter.argument
        return kwargs | {argument: kwargs[argument] * (1 + self.parameter.size)}


def parameters_of(forward: Forward, tokens: Sequence[int], images: Sequence[str] = ()) -> tuple[Parameter, ...]:
    """The parameters that the contracts name, of the operators that a pass over the first `tokens` calls outside of the
    vision tower; in order of execution."""
    found: dict[tuple[str, str, str], list[str]] = {}

    def call(place: str, operator: str, function: Callable, *args: Any, site: str = "", **kwargs: Any) -> Any:
        tap = ".".join(part for part in (place, operator, site) if part)
        named = CONTRACTS[operator].directions if operator in CONTRACTS else ()
        asked = [(operator, d.argument, SAME.get((operator, d.argument), d.words)) for d in named]
        asked += [each for each in MODEL_WIDE if each[0] == operator]
        for key in () if place.startswith("vision") else asked:
            value = kwargs.get(key[1])
            if isinstance(value, float) or (isinstance(value, torch.Tensor) and value.is_floating_point()):
                found.setdefault(key, []).append(tap)
        return function(*args, **kwargs)

    with torch.inference_mode():
        forward(tokens if images else tokens[:FIRST_TOKENS], images, call)
    return tuple(Parameter(*key, tuple(dict.fromkeys(taps))) for key, taps in found.items())
