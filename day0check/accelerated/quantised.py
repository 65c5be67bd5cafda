"""The engine under profile fp8-activations: rows go into linears as E4M3 codes with a scale per 128 columns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from day0check.probe.recorder import Caller, Here

# Operators whose first argument is quantised, each once for all operators at a place that read the same rows.
OPERATORS = frozenset(
    {
        "mla.query",
        "mla.latent",
        "mla.gate",
        "dsa.index_query",
        "kda.project",
        "mlp.dense",
        "moe.down",
        "moe.up",
        "moe.shared",
        "moe.experts",
    }
)


class QuantisingCaller(Caller):
    """A caller that quantises, with the operator `quantise.rows`, what goes into the operators named above."""

    def at(self, place: str) -> Here:
        return _QuantisingHere(self, place)


@dataclass(frozen=True)
class _QuantisingHere(Here):
    quantised: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # the rows are kept: ids repeat

    def __call__(self, operator: str, *args: Any, **kwargs: Any) -> Any:
        if operator not in OPERATORS:
            return super().__call__(operator, *args, **kwargs)
        codes, scale = self._codes(operator, args[0], kwargs)
        return super().__call__(operator, codes, *args[1:], x_scale=scale, **kwargs)

    def _codes(self, operator: str, x: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        if id(x) not in self.quantised:
            site = ".".join(part for part in (operator, kwargs.get("site", "")) if part)
            codes, scale = super().__call__("quantise.rows", x, site=site, row_map=kwargs.get("row_map"))
            self.quantised[id(x)] = (x, codes, scale)
        _, codes, scale = self.quantised[id(x)]
        return codes, scale
