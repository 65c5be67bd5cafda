"""A snapshot in which a request that began behind a cached prefix has the rows of the one that computed the prefix."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch

from day0check.compare.locate import drafting_place, split_tap
from day0check.snapshot import Entry, Rows, Snapshot


class LentRows(Snapshot):
    """`lenders`: request -> the one whose rows stand in below the first position that it computed itself. Their tokens
    are equal there, and so are the choices that lie in the cache: an oracle that follows the request follows these.
    `until`: the records before the call with this execution index, None for all.
    """

    def __init__(self, directory: Path | str, lenders: Mapping[str, str], *, until: int | None = None) -> None:
        super().__init__(directory)
        self._until = until
        self._lenders = dict(lenders)
        self._draft = drafting_place(self.taps())  # a request that did not compute every row drafts nothing
        embedded = next((tap for tap in self.taps() if tap.endswith("embed.tokens")), "")
        self._begun = {  # where the latest computation of each row begins
            name: dict(zip(rows.positions, rows.orders, strict=True))
            for name in (self.requests(embedded) if embedded else ())
            for rows in (Snapshot.recorded(self, embedded, name),)
        }
        self._first = {name: min(Snapshot.recorded(self, embedded, name).positions, default=0) for name in lenders}

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        every = Snapshot(self.directory).entries
        return every if self._until is None else tuple(e for e in every if e.order < self._until)

    def recorded(self, tap: str, request: str, result: int = 0, *, by_position: bool = True) -> Rows:
        own = super().recorded(tap, request, result, by_position=by_position)
        if by_position:
            own = self._latest(request, own)
        lender = self._lenders.get(request)
        first = self._first.get(request, 0)
        if lender is None or not first or (self._draft and split_tap(tap)[0] == self._draft):
            return own
        other = self.recorded(tap, lender, result, by_position=by_position)  # which may have borrowed itself
        lent = [i for i, p in enumerate(other.positions) if p < first]
        if not lent:
            return own
        return Rows(
            (*(other.positions[i] for i in lent), *own.positions),
            (*(other.phases[i] for i in lent), *own.phases),
            (*(other.orders[i] for i in lent), *own.orders),
            torch.cat((other.values[lent], own.values)) if own.positions else other.values[lent],
        )

    def _latest(self, request: str, rows: Rows) -> Rows:
        """Without rows that were computed again since: what they followed from was not kept."""
        begun = self._begun.get(request, {})
        kept = [
            i for i, (p, order) in enumerate(zip(rows.positions, rows.orders, strict=True)) if order >= begun.get(p, -1)
        ]
        if len(kept) == len(rows.positions):
            return rows
        pick = [tuple(column[i] for i in kept) for column in (rows.positions, rows.phases, rows.orders)]
        return Rows(*pick, rows.values[kept])
