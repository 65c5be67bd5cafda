"""Where the work of an operator steps up: from two sizes that lie beside each other. No torch.

What a healthy operator does is a sum of parts that grow with powers of the size, each rounded up to tiles of whatever
width. Since ceil(2 x) <= 2 ceil(x), no such part more than doubles with the size (or grows by the square of two, where
it goes with the square): from a size to its double, work grows by no more than the part of the cost model that grows
most. Where it grows by more, at one size of the sweep and at the next alike, another path is taken in between:
`suspicions` says where.

How much more that path does cannot be read off sizes that lie apart: constants, and keys that are left out, make the
work per unit fall on the way, which hides a part of a step. So the sweep is narrowed until the two sizes are neighbours
(`next_size`), and the work per unit is compared there. `STEP` is half way, in factors, between doing the work once and
doing it twice. A tile's edge alone may be as steep at small sizes, but its work is paid back within a doubling, and
nothing is suspected.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from day0check.compare.cost import CostLine

STEP = 2**0.5
# sizes of a sweep are rounded to whole ones (45 and 91 for a double), and triangles grow a little slower than squares
ROUNDED = 1.05
NEAR = "near "  # before the name of a sweep: lines of sizes at which a step was looked for
_FEWEST = 4  # sizes of a sweep that say something
MOST_SIZES = 40  # at which steps are looked for in one run: nine find one among a thousand positions


Law = tuple[str, float, float, str]  # name, statistic, limit, words


@dataclass(frozen=True)
class Suspicion:
    """Work grew by more than any tiling explains somewhere above size `low` and up to size `high`.

    `excess`: how many times more than the cost model allows.
    """

    tap: str
    phase: str
    sweep: str
    low: int
    high: int
    excess: float


def suspicions(points: Sequence[CostLine]) -> list[Suspicion]:
    """Every place of one tap over one sweep at which work grew by more than its model allows, for two sizes in a row.

    `points`: sorted by size.
    """
    found = []
    for i in range(2, len(points) - 1):
        if points[i].size <= points[i - 1].size:
            continue
        excess = min(_excess(points[i - 2], points[i]), _excess(points[i - 1], points[i + 1]))
        if excess > ROUNDED:
            at = points[i]
            found.append(Suspicion(at.tap, at.phase, at.sweep, points[i - 1].size, at.size, excess))
    return found


def _excess(before: CostLine, after: CostLine) -> float:
    """Growth of the work over the growth of the model's steepest part."""
    parts = ((before.model, after.model), (before.operations, after.operations), (before.bytes, after.bytes))
    allowed = max(b / a for a, b in parts if a > 0)
    return after.work / max(before.work, 1e-12) / max(allowed, 1e-12)


def narrowest(suspicion: Suspicion, points: Iterable[CostLine], near: Iterable[CostLine]) -> tuple[CostLine, CostLine]:
    """The two known sizes beside each other between which the work per unit rises most, within the suspicion."""
    known = {line.size: line for line in points if suspicion.low <= line.size <= suspicion.high}
    known |= {line.size: line for line in near if suspicion.low < line.size < suspicion.high}
    sizes = sorted(known)
    pairs = [(known[a], known[b]) for a, b in pairwise(sizes)]
    return max(pairs, key=lambda pair: rise(*pair))


def rise(before: CostLine, after: CostLine) -> float:
    """Work per unit of the model after, over that before."""
    return (after.work / after.model) / max(before.work / before.model, 1e-12)


def steps_of(points: Iterable[CostLine], near: Iterable[CostLine]) -> tuple[list[Law], str]:
    """The law of each place in one sweep of one tap; and why it is not judged: where the sizes that were asked do not
    lie beside each other. Without a suspicion the statistic is one: the work steps up nowhere."""
    points, near = sorted((p for p in points if p.model > 0), key=lambda p: p.size), tuple(near)
    laws: list[Law] = [("step", 1.0, STEP, "")] if len(points) >= _FEWEST else []
    unresolved = ""
    for suspicion in suspicions(points):
        before, after = narrowest(suspicion, points, near)
        words = (
            f"does {rise(before, after):.3g} times the work per unit from size {after.size} on "
            f"(at size {before.size} not yet)"
        )
        laws.append(("step", rise(before, after), STEP, words))
        if after.size - before.size > 1:
            unresolved = f"where its work steps up between sizes {before.size} and {after.size} was not looked for"
    return laws, unresolved


def next_size(lines: Iterable[CostLine], asked: Collection[tuple[str, int]] = ()) -> tuple[str, int] | None:
    """(sweep, size) at which to look for a step next; None when every suspicion ends at neighbouring sizes, or at a
    size that was `asked` and has no line of the operator.

    `lines`: those of the sweep and those of earlier answers, whose sweep begins with `NEAR`.
    """
    series = by_series(lines)
    for (tap, phase, sweep), points in series.items():
        if sweep.startswith(NEAR):
            continue
        for suspicion in suspicions(points):
            before, after = narrowest(suspicion, points, series.get((tap, phase, NEAR + sweep), ()))
            middle = sweep, (before.size + after.size) // 2
            if after.size - before.size > 1 and middle not in asked:
                return middle
    return None


def by_series(lines: Iterable[CostLine]) -> dict[tuple[str, str, str], list[CostLine]]:
    """Lines with a model by (tap, phase, sweep), smallest size first."""
    series: dict[tuple[str, str, str], list[CostLine]] = {}
    for line in lines:
        if line.model > 0:
            series.setdefault((line.tap, line.phase, line.sweep), []).append(line)
    return {key: sorted(found, key=lambda line: line.size) for key, found in series.items()}
