"""Rows that are laid over ranks: over all ranks each row of a step is there once.

What a rank leaves out, or has in another one's place, is in no comparison with an oracle: that knows only rows that
were recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from day0check.types import Measure

Line = dict[str, Any]
Members = Sequence[tuple[int, Line]]  # one call as each rank recorded it
Row = tuple[str, int]
EMBEDDING = "embed.tokens"  # of every row of a step, on every rank


def laid_over_ranks(line: Line) -> bool:
    """Whether each rank has rows of its own of this result; pairs of experts are rows of none."""
    return str(line.get("dims", "")).lstrip().startswith("rows@") and line["result"] == 0


def row_measures(calls: Iterable[Members]) -> list[Measure]:
    """A measure for each (tap, phase) whose rows are laid over ranks, the first call that is wrong or the first."""
    calls = list(calls)
    embedded = [members[0][1] for members in calls if members[0][1]["tap"] == EMBEDDING]
    due = {(line["phase"], line["step"]): set(_rows(line)) for line in embedded}
    found: dict[tuple[str, str], Measure] = {}
    for members in calls:
        first = members[0][1]
        if not laid_over_ranks(first):
            continue
        at = (first["tap"], first["phase"])
        if at in found and not found[at].passed:
            continue
        whole = due.get((first["phase"], first["step"])) if first["tap"].startswith("layers.") else None
        measure = _measure(members, whole)
        if at not in found or not measure.passed:
            found[at] = measure
    return list(found.values())


def _rows(line: Line) -> list[Row]:
    """Request and position of each row that is no padding."""
    both = zip(line["owner"], line["position"], strict=True)
    return [(line["requests"][owner], position) for owner, position in both if owner >= 0]


def _measure(members: Members, whole: set[Row] | None) -> Measure:
    """Whether each row is on one rank, and none is missing where the rows of the step are known."""
    on: dict[Row, list[int]] = {}
    for rank, line in members:
        for row in _rows(line):
            on.setdefault(row, []).append(rank)
    twice = [row for row, ranks in on.items() if len(ranks) > 1]
    never = sorted((whole or set()) - on.keys())
    wrong, line, rank, text = [*twice, *never], members[0][1], None, ""
    if wrong:
        rank = on[wrong[0]][-1] if twice else None
        where = f"on ranks {', '.join(map(str, on[wrong[0]]))}" if twice else "on no rank"
        text = f"{len(wrong)} of {len(whole or on)} rows are not on one rank each; the first is {where}"
    request, position = wrong[0] if wrong else (None, None)
    place = line["tap"].split(".")
    return Measure(
        tap=f"{line['tap']}.ranks",
        operator=line["operator"],
        kind="move",
        phase=line["phase"],
        layer=int(place[1]) if place[0] == "layers" else None,
        order=line["order"],
        rows=len(on),
        elements=len(on),
        passed=not wrong,
        statistics={"misplaced_rows": float(len(wrong))},
        limits={"misplaced_rows": 0.0},
        failing="misplaced_rows" if wrong else "",
        request=request,
        position=position,
        pattern=("a row on several ranks" if twice else "a row on no rank") if wrong else "",
        message=text,
        rank=rank,
    )
