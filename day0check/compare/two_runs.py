"""Two runs of one candidate on the same tokens: how far they are apart, in the noise that their roundings explain.

Another schedule may legally round elsewhere, so bytes may differ; the noise is that of the reference's replicates on
the same tokens (`noise_book`), and the difference of two runs has twice its variance. A legal choice may flip at a near
tie and then moves everything behind it: rows behind a flip are told apart from those before (`Compared.flips`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from day0check.compare.locate import drafting_place, split_tap
from day0check.compare.net_measures import ROW_LIMIT, layer_of, typical_ratio, whole_limit
from day0check.compare.noise_book import NoiseBook, TapNoise
from day0check.compare.pairing import Pairing
from day0check.contracts import CONTRACTS
from day0check.snapshot import Rows, Snapshot
from day0check.types import Measure

ANOTHER_FACTOR = 2.0  # variance of the difference of two runs, in that of one
_END = 1 << 60


@dataclass(frozen=True)
class _Difference:
    """Rows of one (tap, phase, request) in both runs, [n] each but `replicate_z` [R, n]."""

    request: str
    positions: tuple[int, ...]
    order: int
    columns: int
    z: torch.Tensor
    replicate_z: torch.Tensor
    error: torch.Tensor
    signal: torch.Tensor
    bad: torch.Tensor


@dataclass(frozen=True)
class Compared:
    """`measures`: one per (tap, phase in the other run), judged by noise. `different`: of `rows` rows those with other
    bytes, the first of them at `first` = (tap, request, position). `flips`: request -> first position at which the two
    runs chose differently. `missing`: what of the pairings could not be compared, in words, empty when nothing."""

    measures: tuple[Measure, ...]
    rows: int
    different: int
    first: tuple[str, str, int] | None
    flips: dict[str, int]
    missing: str


@dataclass
class _Table:
    pairings: Sequence[Pairing]
    before: dict[str, int]
    draft: str = ""  # place of the layer that drafts
    groups: dict[tuple[str, str], list[_Difference]] = field(default_factory=dict)
    flips: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    different: int = 0
    first: tuple[str, str, int] | None = None
    seen: set[str] = field(default_factory=set)
    missing: str = ""

    def ahead(self, tap: str) -> int:
        """How many tokens behind its own position a row of the tap has seen."""
        return 1 if self.draft and split_tap(tap)[0] == self.draft else 0


def compare_runs(
    here: Snapshot,
    there: Snapshot,
    pairings: Sequence[Pairing],
    book: NoiseBook,
    *,
    before: dict[str, int] | None = None,
) -> Compared:
    """Every captured tap of a travelling result that both runs have, row by row where the pairings say so.

    `before`: request of `here` -> only its rows below this position. Raises InputError for damaged snapshots.
    """
    common = [tap for tap in here.taps() if tap in set(there.taps())]
    table = _Table(pairings, before or {}, drafting_place(common))
    for tap in common:
        operator = split_tap(tap)[1] or tap
        if operator not in CONTRACTS or not CONTRACTS[operator].net or operator == "sample.token":
            continue
        if dropped := here.dropped(tap) or there.dropped(tap):
            table.missing = table.missing or f"rows of {tap} were not kept: {dropped}"
        for pairing in pairings:
            _compare_tap(table, here, there, tap, operator, pairing, book)
    for pairing in pairings:
        if pairing.here not in table.seen and not table.missing:
            table.missing = f"no row of request {pairing.here} is in both runs"
    measures = [_judge(tap, phase, found) for (tap, phase), found in table.groups.items()]
    measures.sort(key=lambda m: (m.order, m.tap, m.phase))
    return Compared(tuple(measures), table.rows, table.different, table.first, table.flips, table.missing)


def _compare_tap(
    table: _Table, here: Snapshot, there: Snapshot, tap: str, operator: str, pairing: Pairing, book: NoiseBook
) -> None:
    vision = tap.startswith("vision.")
    mine = here.recorded(tap, pairing.here, by_position=not vision)
    theirs = there.recorded(tap, pairing.there, by_position=not vision)
    until = _END if pairing.until is None else pairing.until - table.ahead(tap)
    until = min(until, table.before.get(pairing.here, _END))
    own, other = _same_rows(mine, theirs, pairing, _END if vision else until, vision)
    if not own:
        return
    a, b = mine.values[own].flatten(1), theirs.values[other].flatten(1)
    if CONTRACTS[operator].kind == "choose":
        at = [mine.positions[i] for i, flipped in zip(own, _differ(a, b), strict=True) if flipped]
        if at:
            table.flips[pairing.here] = min((table.flips.get(pairing.here, _END), *at))
        return
    if a.shape != b.shape:
        table.missing = table.missing or f"rows of {tap} have {a.shape[1]} elements, and {b.shape[1]} in the other run"
        return
    noise = book.of(pairing.there, tap)
    index = other if vision else [theirs.positions[i] for i in other]
    if noise is None or (vision and len(noise.signal) != len(theirs.positions)) or max(index) >= len(noise.signal):
        table.missing = table.missing or f"the reference pass has no noise for {tap} of request {pairing.there}"
        return
    table.seen.add(pairing.here)
    _count_bytes(table, tap, pairing.here, [mine.positions[i] for i in own], a, b)
    at = torch.tensor(index)
    for phase in dict.fromkeys(theirs.phases[i] for i in other):
        rows = [n for n, i in enumerate(other) if theirs.phases[i] == phase]
        found = _difference(a[rows], b[rows], noise, at[rows])
        where = (pairing.here, tuple(mine.positions[own[n]] for n in rows), min(mine.orders[own[n]] for n in rows))
        table.groups.setdefault((tap, phase), []).append(_Difference(*where, a.shape[1], *found))


def _same_rows(mine: Rows, theirs: Rows, pairing: Pairing, until: int, vision: bool) -> tuple[list[int], list[int]]:
    """Indices of the rows of both runs that belong together."""
    if vision:
        wanted = {p + pairing.shift for p in mine.positions}
        other = [i for i, p in enumerate(theirs.positions) if p in wanted]
        return (list(range(len(mine.positions))), other) if len(other) == len(mine.positions) else ([], [])
    place = {p: i for i, p in enumerate(theirs.positions)}
    own = [i for i, p in enumerate(mine.positions) if p in place and p < until]
    return own, [place[mine.positions[i]] for i in own]


def _differ(a: torch.Tensor, b: torch.Tensor) -> list[bool]:
    """Whether rows [n, k] chose other numbers, in whatever order; -1 is none."""
    width = max(a.shape[1], b.shape[1])
    a, b = (torch.nn.functional.pad(x.long(), (0, width - x.shape[1]), value=-1).sort(-1).values for x in (a, b))
    return (a != b).any(-1).tolist()


def _count_bytes(table: _Table, tap: str, request: str, positions: list[int], a: torch.Tensor, b: torch.Tensor) -> None:
    differ = torch.ones(len(a), dtype=torch.bool)
    if a.dtype == b.dtype:
        differ = (a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).any(-1)
    table.rows += len(a)
    table.different += int(differ.sum())
    if table.first is None and bool(differ.any()):
        table.first = (tap, request, positions[int(differ.nonzero()[0])])


def _difference(a: torch.Tensor, b: torch.Tensor, noise: TapNoise, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, b = a.double(), b.double()
    f = noise.factors
    variance = ANOTHER_FACTOR * (f.rows[at].unsqueeze(-1) * f.columns + f.floor[at].unsqueeze(-1))
    both = torch.isfinite(a) & torch.isfinite(b)
    square = torch.where(both, a - b, 0.0).square()
    bad = (torch.isfinite(a) != torch.isfinite(b)).any(-1)
    return (square / variance).mean(-1), noise.replicate_z[:, at], square.sum(-1), noise.signal[at], bad.double()


# ------------------------------------------------------------------------------------------------------- judging


def _judge(tap: str, phase: str, found: Sequence[_Difference]) -> Measure:
    """The measure of one (tap, phase): that of the request which is nearest to its limits, or beyond them."""
    judged = [_judge_one(tap, phase, one) for one in found]
    worst = max(judged, key=lambda m: (not m.passed, _used(m)))
    return _with_rows(worst, sum(m.rows for m in judged), min(m.order for m in judged))


def _with_rows(measure: Measure, rows: int, order: int) -> Measure:
    width = measure.elements // max(measure.rows, 1)
    return Measure(**{**vars(measure), "rows": rows, "elements": rows * width, "order": order})


def _used(m: Measure) -> float:
    return max((m.statistics[k] / m.limits[k] for k in m.limits if m.limits[k] > 0), default=0.0)


def _judge_one(tap: str, phase: str, d: _Difference) -> Measure:
    operator = split_tap(tap)[1] or tap
    rows = d.z.sqrt()
    statistics = {
        "non_finite": float(d.bad.sum()),
        "whole": typical_ratio(d.z, d.replicate_z),
        "row": float(rows.max()),
        "relative_l2": (float(d.error.sum()) / max(float(d.signal.sum()), 1e-300)) ** 0.5,
    }
    limits = {"non_finite": 0.0, "whole": whole_limit(d.replicate_z), "row": ROW_LIMIT}
    failing = next((name for name in limits if not statistics[name] <= limits[name]), "")
    at = None
    if failing == "non_finite":
        at = _lowest(d.positions, d.bad > 0)
    elif failing == "row":
        at = _lowest(d.positions, rows > ROW_LIMIT)
    elif failing:
        at = d.positions[int(rows.argmax())]
    pattern, message = _in_words(failing, statistics, limits)
    return Measure(
        tap=tap,
        operator=operator,
        kind=CONTRACTS[operator].kind,
        phase=phase,
        layer=layer_of(tap),
        order=d.order,
        rows=len(d.positions),
        elements=len(d.positions) * d.columns,
        passed=not failing,
        statistics=statistics,
        limits=limits,
        failing=failing,
        request=d.request,
        position=at,
        pattern=pattern,
        message=message,
    )


def _lowest(positions: Iterable[int], beyond: torch.Tensor) -> int:
    return min(p for p, yes in zip(positions, beyond.tolist(), strict=True) if yes)


def _in_words(failing: str, statistics: dict[str, float], limits: dict[str, float]) -> tuple[str, str]:
    if not failing:
        return "", ""
    value, limit = statistics[failing], limits[failing]
    return {
        "non_finite": ("nan", f"{value:.0f} rows hold NaN or infinity in one of the two runs alone"),
        "row": ("one row", f"a row differs by {value:.3g} noises between the two runs, limit {limit:.3g}"),
        "whole": (
            "whole",
            f"the two runs differ by {value:.3g} times the noise of random rounding, limit {limit:.3g} "
            f"(relative difference {statistics['relative_l2']:.2g})",
        ),
    }[failing]
