"""In words where the wrong rows of a tap lie: behind a position, on a page, at the begin of chunks, in the first call.

Words for people beside the pattern, which groups findings: they hold numbers of the run, and no finding's id does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from day0check.compare.judgement import Judgement
from day0check.probe.rows import PADDING, RowMap

if TYPE_CHECKING:
    from day0check.compare.pooling import Seen

MOST_ROWS = 20_000  # of one request that are remembered
LEAST_CALLS = 3  # below that "first" says nothing
LEAST_GROWN, GROWS_BY = 9, 4.0  # wrong rows in thirds, and how much the last third is worse than the first


@dataclass
class _Rows:
    """Positions of one request: those of the calls that failed, the wrong ones with their size, begins of all calls."""

    seen: set[int] = field(default_factory=set)
    wrong: dict[int, float] = field(default_factory=dict)
    begins: set[int] = field(default_factory=set)


@dataclass
class Places:
    """Gathers the judgements of one tap in one phase."""

    calls: int = 0
    wrong_calls: set[int] = field(default_factory=set)
    unknown: bool = False  # a failure that named no rows
    _rows: dict[str, _Rows] = field(default_factory=dict)

    def see(
        self, calls: list[Seen], judgements: Iterable[Judgement], begins: Callable[[RowMap], dict[str, int]]
    ) -> None:
        """The judgements of the results of `calls`, which were judged together. `begins`: as `begins_of`."""
        wrong: dict[int, float] = {}
        for judgement in judgements:
            if not judgement.passed:
                self.unknown |= not judgement.bad or judgement.axis != "rows"
                sizes = judgement.sizes or (0.0,) * len(judgement.bad)
                wrong.update(zip(judgement.bad, sizes, strict=True) if judgement.axis == "rows" else ())
        first = 0
        for seen in calls:
            count = len(seen.rows)
            own = {row - first: size for row, size in wrong.items() if first <= row < first + count}
            first += count
            for name, position in begins(seen.rows).items():
                self._rows.setdefault(name, _Rows()).begins.add(position)
            if own:
                self._see_wrong(seen.rows, own)
                self.wrong_calls.add(self.calls)
            self.calls += 1

    def _see_wrong(self, rows: RowMap, wrong: dict[int, float]) -> None:
        for row, (owner, position) in enumerate(zip(rows.owner, rows.position, strict=True)):
            if owner == PADDING:
                continue
            own = self._rows[rows.requests[owner]]
            if len(own.seen) < MOST_ROWS:
                own.seen.add(position)
                if row in wrong:
                    own.wrong[position] = max(wrong[row], own.wrong.get(position, 0.0))

    def in_words(self, page: int | None) -> str:
        """Everything that can be said, joined by commas; "" for nothing. `page`: positions on a page of the caches."""
        if not self.wrong_calls or self.unknown:
            return ""
        told = []
        if self.wrong_calls == {0} and self.calls >= LEAST_CALLS:
            told.append(f"in its first call only, of {self.calls}")
        rows = max(self._rows.values(), key=lambda r: len(r.wrong))
        some_passed = len(self.wrong_calls) < self.calls
        told += [where] if (where := _where(rows, page, some_passed)) else []
        told += [grown] if (grown := growth(rows.wrong)) else []
        return ", ".join(told)


def begins_of(rows: RowMap) -> dict[str, int]:
    """The smallest position of each request."""
    found: dict[str, int] = {}
    for owner, position in zip(rows.owner, rows.position, strict=True):
        if owner != PADDING:
            name = rows.requests[owner]
            found[name] = min(position, found.get(name, position))
    return found


def _where(rows: _Rows, page: int | None, some_passed: bool) -> str:
    wrong, seen = set(rows.wrong), rows.seen
    chunks = rows.begins - {min(rows.begins)}
    if len(chunks) > 1 and len(rows.wrong) > 1 and wrong - {min(rows.begins)} == chunks:
        return "the first row of each chunk"
    if wrong == seen:
        first = min(wrong)
        behind = some_passed and first in chunks and len(wrong) > 1
        return f"every row of the chunks from position {first} on" if behind else ""
    first, last = min(wrong), max(wrong)
    if page and len(wrong) > 1 and len({p // page for p in wrong}) == 1 and len({p // page for p in seen}) > 1:
        if wrong == {p for p in seen if p // page == first // page}:
            return f"the rows of page {first // page} of the request alone (positions {first} to {last})"
    if wrong == {p for p in seen if p >= first}:
        edge = f", where page {first // page} of the request begins" if page and first % page == 0 else ""
        return f"every row from position {first} on{edge}" if len(wrong) > 1 else ""
    if wrong == {p for p in seen if p <= last} and len(wrong) > 1:
        edge = f", where page {last // page} of the request ends" if page and (last + 1) % page == 0 else ""
        return f"every row up to position {last}{edge}"
    for place, words in ((0, "first"), (page - 1 if page else 0, "last")):
        if page and page > 1 and len(wrong) > 1 and {p % page for p in wrong} == {place}:
            return f"the {words} row of pages alone"
    return ""


def growth(sizes: dict[int, float], what: str = "position", least: int = LEAST_GROWN) -> str:
    """Whether errors grow along their places, `least` of them or more: each third is worse than the one before."""
    ordered = [sizes[at] for at in sorted(sizes)]
    if len(ordered) < max(3, least) or not all(0 < size < float("inf") for size in ordered):
        return ""
    third = len(ordered) // 3
    parts = [sorted(part)[len(part) // 2] for part in (ordered[:third], ordered[third:-third], ordered[-third:])]
    if parts[0] < parts[1] < parts[2] and parts[2] >= GROWS_BY * parts[0]:
        return f"growing with the {what}: {parts[2] / parts[0]:.2g} times from its first third to its last"
    return ""
