"""One operator call as the reference can repeat it: arguments by name, widened, through the contract's function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from day0check.contracts.contract import Contract

Round = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Replay:
    """A contract and the arguments of one call (or of several calls joined by rows), by name."""

    contract: Contract
    arguments: Mapping[str, Any]

    def wide(self, dtype: torch.dtype) -> Replay:
        """The same with floating-point arguments in `dtype`; 8-bit payloads stay, the reference decodes them."""
        return Replay(self.contract, {name: _wide(value, dtype) for name, value in self.arguments.items()})

    def changed(self, **arguments: Any) -> Replay:
        return Replay(self.contract, {**self.arguments, **arguments})

    def run(self, round: Round | None = None, function: Callable[..., Any] | None = None) -> tuple[Any, ...]:
        """The reference's results. `round` is passed on when the contract names rounding points."""
        first, *rest = (a.name for a in self.contract.args)
        keywords = {name: self.arguments[name] for name in rest if name in self.arguments}
        if round is not None and self.contract.points:
            keywords["round"] = round
        function = self.contract.function() if function is None else function
        with torch.no_grad():
            result = function(self.arguments[first], **keywords)
        return result if isinstance(result, tuple) else () if result is None else (result,)

    def row_names(self) -> tuple[str, ...]:
        """Arguments that have one entry per row of the first argument, the owner included."""
        return tuple(a.name for a in self.contract.args if a.role in ("rows", "owner") and self._is_tensor(a.name))

    def floats(self) -> dict[str, torch.Tensor]:
        """The wide floating-point tensors among the arguments."""
        return {
            name: value
            for name, value in self.arguments.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() >= 2
        }

    def _is_tensor(self, name: str) -> bool:
        return isinstance(self.arguments.get(name), torch.Tensor)


def _wide(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() >= 2:
        return value.detach().to(dtype)
    return value.detach() if isinstance(value, torch.Tensor) else value


def named(contract: Contract, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the contract's names: the first is positional. Raises ValueError on a call of another shape."""
    if len(args) > 1:
        raise ValueError(f"{len(args)} positional arguments; the first is positional, every other a keyword")
    arguments = dict(kwargs)
    if args:
        arguments[contract.args[0].name] = args[0]
    missing = [a.name for a in contract.args if not a.optional and a.name not in arguments]
    if missing:
        raise ValueError(f"argument {missing[0]!r} is missing")
    unknown = sorted(set(arguments) - {a.name for a in contract.args})
    if unknown:
        raise ValueError(f"argument {unknown[0]!r} is not one of the contract's")
    return arguments
