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

Kernels change at thresholds for good reasons, too, and of an operator that takes next to nothing every shape has a path
of its own. So a step is one where the operator, over all its layers, adds `MATTERS` of the whole step's work or more;
where it does not even take that much, nobody looks.
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
MATTERS = 0.02  # of the work of a whole step: less than its time differs by from run to run
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
    """Growth of the work over the growth of the model's steepest part. Where the model grows at all, a part of it goes
    with the size, though weights that are read once may weigh more in the model than in the work."""
    parts = [(before.model, after.model), (before.operations, after.operations), (before.bytes, after.bytes)]
    if after.model > ROUNDED * before.model:
        parts.append((before.size, after.size))
    allowed = max(b / a for a, b in parts if a > 0)
    return after.work / max(before.work, 1e-12) / max(allowed, 1e-12)


class Steps:
    """Where the work steps up, over all taps of `lines`: those of a sweep and, from sizes that were asked because of
    them, those of sweeps whose name begins with `NEAR`."""

    def __init__(self, lines: Iterable[CostLine]) -> None:
        lines = tuple(lines)
        self._series = by_series(lines)
        self._whole: dict[tuple[str, str, int], float] = {}
        for line in lines:
            self._whole[_step_of(line)] = self._whole.get(_step_of(line), 0.0) + line.work
        self._like: dict[tuple[str, ...], list[Suspicion]] = {}
        self._found = {key: self._worth_a_look(points) for key, points in self._series.items() if NEAR not in key[2]}
        for (tap, *_), found in self._found.items():
            for suspicion in found:
                self._like.setdefault(self._kind(tap, suspicion), []).append(suspicion)

    def next_size(self, asked: Collection[tuple[str, int]] = ()) -> tuple[str, int] | None:
        """(sweep, size) at which to look next; None when every suspicion ends at sizes beside each other, or at a size
        that was `asked` and has no line of the operator."""
        for found in self._found.values():
            for suspicion in found:
                before, after = self._narrowest(suspicion)
                middle = suspicion.sweep, (before.size + after.size) // 2
                if after.size - before.size > 1 and middle not in asked:
                    return middle
        return None

    def laws(self, tap: str, phase: str, sweep: str) -> tuple[list[Law], str]:
        """The law at each place in one sweep of one tap; and why it is not judged, where sizes that lie beside each
        other were not asked. Without a suspicion the statistic is one: the work steps up nowhere."""
        laws: list[Law] = [("step", 1.0, STEP, "")] if len(self._series.get((tap, phase, sweep), ())) >= _FEWEST else []
        unresolved = ""
        for suspicion in self._found.get((tap, phase, sweep), ()):
            before, after = self._narrowest(suspicion)
            added = sum(self._added(other) for other in self._like[self._kind(tap, suspicion)])
            if added >= MATTERS or rise(before, after) <= STEP:
                words = (
                    f"does {rise(before, after):.3g} times the work per unit from size {after.size} on (at size "
                    f"{before.size} not yet), which adds {100 * added:.2g}% to the whole step"
                )
                laws.append(("step", rise(before, after), STEP, words))
            if after.size - before.size > 1:
                unresolved = f"where its work steps up between sizes {before.size} and {after.size} was not looked for"
        return laws, unresolved

    def _worth_a_look(self, points: Sequence[CostLine]) -> list[Suspicion]:
        return [s for s in suspicions(points) if self._share(points[0], s) >= MATTERS]

    def _share(self, line: CostLine, suspicion: Suspicion) -> float:
        """What the operator takes of the whole step where a suspicion ends, over all its layers."""
        phase, sweep, size = line.phase, line.sweep, suspicion.high
        alike = [points for (tap, *at), points in self._series.items() if at == [phase, sweep] and _alike(tap, line)]
        taken = sum(point.work for points in alike for point in points if point.size == size)
        return taken / max(self._whole[phase, sweep, size], 1e-12)

    def _kind(self, tap: str, suspicion: Suspicion) -> tuple[str, ...]:
        operator = self._series[tap, suspicion.phase, suspicion.sweep][0].operator
        place = operator, tap.partition(operator)[2]
        return *place, suspicion.phase, suspicion.sweep, str(suspicion.low)

    def _added(self, suspicion: Suspicion) -> float:
        """What the step of one tap adds to the work of the whole step."""
        before, after = self._narrowest(suspicion)
        added = after.work - before.work / before.model * after.model
        return added / max(self._whole[_step_of(after)], 1e-12) if rise(before, after) > STEP else 0.0

    def _narrowest(self, suspicion: Suspicion) -> tuple[CostLine, CostLine]:
        """The two known sizes beside each other between which the work per unit rises most, within the suspicion."""
        key = suspicion.tap, suspicion.phase, suspicion.sweep
        near = self._series.get((*key[:2], NEAR + suspicion.sweep), ())
        known = {line.size: line for line in self._series[key] if suspicion.low <= line.size <= suspicion.high}
        known |= {line.size: line for line in near if suspicion.low < line.size < suspicion.high}
        return max(pairwise([known[size] for size in sorted(known)]), key=lambda pair: rise(*pair))


def _step_of(line: CostLine) -> tuple[str, str, int]:
    return line.phase, line.sweep, line.size


def _alike(tap: str, line: CostLine) -> bool:
    """Whether a tap is the operator of a line at the same site, in whatever layer."""
    return line.operator in tap and tap.partition(line.operator)[2] == line.tap.partition(line.operator)[2]


def rise(before: CostLine, after: CostLine) -> float:
    """Work per unit of the model after, over that before."""
    return (after.work / after.model) / max(before.work / before.model, 1e-12)


def by_series(lines: Iterable[CostLine]) -> dict[tuple[str, str, str], list[CostLine]]:
    """Lines with a model by (tap, phase, sweep), smallest size first."""
    series: dict[tuple[str, str, str], list[CostLine]] = {}
    for line in lines:
        if line.model > 0:
            series.setdefault((line.tap, line.phase, line.sweep), []).append(line)
    return {key: sorted(found, key=lambda line: line.size) for key, found in series.items()}
