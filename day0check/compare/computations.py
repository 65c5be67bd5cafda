"""The computations of one request: from its first position, or from behind a prefix, up to where it was interrupted.

After a preemption rows are computed again, and legal choices may fall otherwise. What was computed before follows from
the earlier choices, and what is computed afterwards from the later ones: each is held against an oracle of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from day0check.compare.lent_rows import LentRows
from day0check.snapshot import Rows, Snapshot

LOGITS = "head.logits"


@dataclass(frozen=True)
class Computation:
    """`view`: the records as they were when it ended; of its rows those from position `first` on are judged with it,
    the others with a later one. `last`: nothing was computed again after it. `again`: something was computed again."""

    view: Snapshot
    first: int = 0
    last: bool = True
    again: bool = False

    def judged(self, rows: Rows) -> Rows:
        """The part of `rows` that is judged with this computation."""
        kept = [i for i, position in enumerate(rows.positions) if position >= self.first]
        if len(kept) == len(rows.positions):
            return rows
        columns = [tuple(column[i] for i in kept) for column in (rows.positions, rows.phases, rows.orders)]
        return Rows(*columns, rows.values[kept])

    def tokens(self, request: str) -> frozenset[int] | None:
        """The positions behind which a token was chosen with this computation; None: behind every one."""
        if not self.again or LOGITS not in self.view.taps():
            return None
        return frozenset(self.judged(self.view.recorded(LOGITS, request)).positions)


def computations(snapshot: Snapshot, request: str) -> tuple[Computation, ...]:
    """Those of `request`, in order of execution, at least one.

    A computation whose tokens are not those of the last one (a draft that was rolled back) is left out: what it fed to
    the model is not known. Rows of further runs that were lent are those of one computation.
    """
    embedded = next((tap for tap in snapshot.taps() if tap.endswith("embed.tokens")), "")
    begins = list(_begins(snapshot, embedded, request)) if embedded and not isinstance(snapshot, LentRows) else []
    if len(begins) < 2:
        return (Computation(snapshot),)
    last = LentRows(snapshot.directory, {})
    found = [
        Computation(LentRows(snapshot.directory, {}, until=order), first, last=False, again=True)
        for order, first in begins[1:]
    ]
    kept = [c for c in found if _same_tokens(c.view, last, embedded, request)]
    return (*kept, Computation(last, again=True))


def _begins(snapshot: Snapshot, embedded: str, request: str) -> Iterator[tuple[int, int]]:
    """(execution index, first position) of the first call of each computation."""
    reached = None
    for entry in sorted((e for e in snapshot.entries if e.tap == embedded), key=lambda e: e.order):
        rows = zip(entry.owner, entry.position, strict=True)
        own = [p for o, p in rows if o >= 0 and entry.requests[o] == request]
        if own and (reached is None or min(own) <= reached):
            yield entry.order, min(own)
            reached = max(own)
        elif own:
            reached = max(reached, *own)


def _same_tokens(before: Snapshot, after: Snapshot, embedded: str, request: str) -> bool:
    """Whether rows at the same position have the same embedding, which a token gives by itself."""
    (old, old_rows), (new, new_rows) = before.rows(embedded, request), after.rows(embedded, request)
    at = {position: row for row, position in enumerate(new)}
    both = [(row, at[position]) for row, position in enumerate(old) if position in at]
    if not both:
        return False
    ours, theirs = (torch.tensor(rows) for rows in zip(*both, strict=True))
    return torch.equal(old_rows[ours], new_rows[theirs])
