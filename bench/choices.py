"""The choices of a candidate's step, and a reference that follows them.

Two implementations in float32 fall otherwise at a near tie (an index key, an expert), and everything behind it moves.
A comparison of their answers says something only when both went the same way; where the reference would have gone
another is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from day0check.compare.propagated import routed
from day0check.probe.recorder import Call, Observer

CHOOSING = ("dsa.select", "moe.route")


class Choices(Observer):
    """What a step chose at each (place, operator, site): tiles of its rows are put together again."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, str], list[Tensor]] = {}

    def after(self, call: Call, token: Any, results: tuple[Tensor, ...]) -> None:
        if call.operator in CHOOSING:
            self._seen.setdefault((call.place, call.operator, call.site), []).append(results[0].clone())

    def at(self, place: str, operator: str, site: str) -> Tensor:
        """Indices [rows, k]. Raises KeyError for a place where nothing was chosen."""
        return torch.cat(self._seen[place, operator, site])


class Following:
    """The `call` of a reference that takes the choices of a candidate. `otherwise` lists (place, operator, row) where
    its own would have been others."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.otherwise: list[tuple[str, str, int]] = []

    def __call__(
        self, place: str, operator: str, function: Callable[..., Any], *args: Any, site: str = "", **kwargs: Any
    ) -> Any:
        own = function(*args, **kwargs)
        if operator not in CHOOSING:
            return own
        theirs = self.choices.at(place, operator, site)
        mine = own[0] if isinstance(own, tuple) else own
        moved = (_in_order(mine, mine.shape[-1]) != _in_order(theirs, mine.shape[-1])).any(-1)
        self.otherwise += [(place, operator, row) for row in moved.nonzero().flatten().tolist()]
        if operator == "moe.route":
            return routed(theirs.sort(dim=-1).values, *args, **kwargs)
        return _in_order(theirs, mine.shape[-1]).to(mine.dtype)


def _in_order(chosen: Tensor, width: int) -> Tensor:
    """Choices [rows, width] int64 in ascending order, -1 for none behind them, as the reference gives them."""
    last = torch.iinfo(torch.int64).max
    ordered = chosen.long().masked_fill(chosen < 0, last).sort(dim=-1).values
    ordered = torch.nn.functional.pad(ordered, (0, max(0, width - ordered.shape[-1])), value=last)[:, :width]
    return ordered.masked_fill(ordered == last, -1)
