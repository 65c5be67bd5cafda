"""Rows of a step laid over tensor parallel ranks between the products that are cut (sequence parallelism).

Each rank holds a run of the rows of the residual spine: it norms, mixes and adds those alone. In front of a product
whose columns are cut the rows of all ranks are gathered; behind one whose rows are cut the parts of a sum are not given
to every rank, but each rank gets the parts of its own rows and sums them. Source: Korthikanti et al., Reducing
Activation Recomputation in Large Transformer Models (arXiv 2205.05198), section 4.2.2.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from day0check.accelerated.parallel.group import Group
from day0check.accelerated.parallel.layout import Range, cut
from day0check.accelerated.parallel.pace import Pace
from day0check.accelerated.residual import Spine
from day0check.probe.recorder import Here
from day0check.probe.rows import RowMap


@dataclass(frozen=True)
class OwnHere(Here):
    """The caller `every` of all rows at a place, for calls on this rank's rows alone: `rows` is their map where a call
    names none."""

    every: Here
    rows: RowMap

    def __call__(self, operator: str, *args: Any, row_map: RowMap | None = None, **kwargs: Any) -> Any:
        return self.every(operator, *args, row_map=self.rows if row_map is None else row_map, **kwargs)


@dataclass(frozen=True)
class Spread:
    """The rows of one step over the ranks of `group`: those of rank r are `shares[r]`; `rows` is the map of all."""

    group: Group
    shares: tuple[Range, ...]
    rows: RowMap

    @property
    def mine(self) -> slice:
        return slice(*self.shares[self.group.rank])

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.shares)

    @functools.cached_property
    def own_rows(self) -> RowMap:
        return self.rows.take(range(*self.shares[self.group.rank]))

    def at(self, at: Here) -> OwnHere:
        """The same place for calls on this rank's rows."""
        return OwnHere(at.caller, at.place, at, self.own_rows)

    def gathered(self, at: Here, x: Tensor, site: str) -> Tensor:
        """All rows [rows, D], from this rank's rows `x`."""
        where = {"group": self.group, "axis": 0, "sizes": self.sizes}
        return self.at(at)("comm.all_gather", x, site=site, **where)

    def summed(self, at: Here, y: Tensor, site: str) -> Tensor:
        """The sums [own rows, D] over ranks of the parts `y` [rows, D] that each has of all rows."""
        own, size = self.sizes[self.group.rank], self.group.size
        came = at("comm.all_to_all", y, site=site, group=self.group, send=self.sizes, receive=(own,) * size)
        parts = came.view(size, own, *y.shape[1:]).transpose(0, 1)
        return self.at(at)("comm.reduce_scatter", parts, site=site)

    def whole(self, spine: Spine, *, empty: Tensor) -> SpreadSpine:
        """What comes out of a spine of this rank's rows, on every rank."""
        return SpreadSpine(spine, self, empty=empty)


def spread(group: Group, rows: RowMap, count: int) -> Spread | None:
    """How `count` rows of a step are laid over ranks: the first ones have one more where it does not come out even.

    None for fewer rows than ranks: no rank may be without rows, and sums of so few rows go to all.
    """
    return None if count < group.size else Spread(group, cut(count, group.size), rows)


class SpreadSpine:
    """What comes out of a spine of which this rank holds its rows; the sublayers have been through it."""

    def __init__(self, spine: Spine, spread: Spread, *, empty: Tensor) -> None:
        """`empty` [0, D]: what a rank gives that holds none of the wanted rows."""
        self.spine, self.spread, self.empty = spine, spread, empty

    def output(self, at: Here, wanted: Tensor, row_map: RowMap) -> Tensor:
        """The rows `wanted` of all ranks' rows [wanted, D] on every rank; int64, ascending."""
        places = wanted.tolist()
        shares = self.spread.shares
        owners = [[n for n, row in enumerate(places) if start <= row < stop] for start, stop in shares]
        rank = self.spread.group.rank
        mine, start = owners[rank], shares[rank][0]
        pace = Pace(at.caller.recorder)
        part = self.spine.output(at, wanted[mine] - start, row_map.take(mine)) if mine else self.empty
        pace.stage()
        gather = {"group": self.spread.group, "axis": 0, "sizes": tuple(map(len, owners))}
        return at("comm.all_gather", part, site="output_rows", row_map=row_map.take(mine), **gather)
