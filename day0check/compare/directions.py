"""Slopes and named directions of one compute result: which factor or parameter is wrong, by how much, and what would
have been seen. Legend as in `slopes.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from day0check.compare import slopes
from day0check.compare.noise import NoiseMap
from day0check.compare.slopes import Lanes, Projection, family, lanes, over_rows

STEP = 2.0**-12  # relative change of a parameter in the finite difference
LARGEST = 0.5
LEAST_ROUNDING = 0.5  # share of the change by an unclaimed rounding below which the error does not hold it
EXPLAINS = 0.5  # share of the excess error that a statement must explain to be told beside another statistic


@dataclass(frozen=True)
class Parameter:
    """A parameter's words, and the change of the result [rows, ...] float64 with its logarithm."""

    name: str
    words: str
    per_head: bool
    derivative: Callable[[], torch.Tensor | None]


@dataclass(frozen=True)
class Unclaimed:
    """A rounding point that the contract names and the claimed precision leaves out, and the change of the result
    [rows, ...] float64 by rounding to nearest there. An error that holds this change once was rounded there."""

    point: str
    change: Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Known:
    """What slopes need beside the noise map.

    error, oracle [R, H, C] float64; `deviations`: the replicates' errors before the output rounding; `nearest`: gives
    the error of a candidate that rounds to nearest everywhere, asked for only when a limit is passed; `groups`: names
    of groups of rows with int64 [R] numbers (the experts of pairs); `coupled`: errors of rows depend on each other;
    `alike`: so many rows err as one (`equal_rows.rows_as_one`).
    """

    error: torch.Tensor
    oracle: torch.Tensor
    noise: NoiseMap
    counted: torch.Tensor
    deviations: list[torch.Tensor] = field(default_factory=list)
    nearest: Callable[[], torch.Tensor] | None = None
    groups: tuple[tuple[str, torch.Tensor], ...] = ()
    coupled: bool = False
    alike: float = 1.0


@dataclass(frozen=True)
class Statement:
    """One family of groups by its worst: `key` names the statistic, `power` is the amplitude that had to show in
    every group (in the whole: in the one there is)."""

    key: str
    significance: float
    limit: float
    amplitude: float
    spread: float
    power: float
    explained: float  # of the sum of squared z
    subject: str  # "the result", "head 1", "softmax scale of head 1"
    pattern: str
    row: int | None = None

    @property
    def beyond(self) -> bool:
        return self.significance > self.limit

    def text(self) -> str:
        if self.key.startswith("rounding"):
            return f"{self.subject}: the error holds the change by it {self.amplitude:.2g} times (± {self.spread:.1g})"
        size = abs(self.amplitude)
        way = "large" if self.amplitude > 0 else "small"
        return f"{self.subject} {100 * size:.3g}% too {way} (± {100 * self.spread:.1g}%)"


def slope_statements(known: Known, *, always_nearest: bool = False) -> list[Statement]:
    """The slopes of the whole, rows, columns, tiles, heads and groups of rows, beside those of rounding to nearest
    where one is beyond its limit, or always."""
    return _decided(known, known.oracle, lambda own: _slopes(known, own), always=always_nearest)


def parameter_statements(known: Known, parameters: Iterable[Parameter]) -> list[Statement]:
    """The estimated relative error of each parameter, one operator evaluation each."""
    found: list[Statement] = []
    for parameter in parameters:
        change = parameter.derivative()
        if change is not None:
            found += _along(known, change, lambda own, p=parameter: _directions(known, own, p))
    return found


def rounding_statements(known: Known, unclaimed: Iterable[Unclaimed]) -> list[Statement]:
    """How often the change by each unclaimed rounding is in the error, one operator evaluation each: a legal error
    holds none of it, however much larger than that change it is."""
    found: list[Statement] = []
    for rounding in unclaimed:
        found += _along(known, rounding.change(), lambda own, r=rounding: _rounded(known, own, r))
    return found


def _along(known: Known, change: torch.Tensor, describe: Callable[[Lanes], list[Statement]]) -> list[Statement]:
    direction = torch.where(known.counted, torch.nan_to_num(change.reshape(known.oracle.shape)), 0.0)
    return _decided(known, direction, describe)


def _decided(
    known: Known, direction: torch.Tensor, describe: Callable[[Lanes], list[Statement]], *, always: bool = False
) -> list[Statement]:
    def made(error: torch.Tensor) -> Lanes:
        return lanes(error, known.deviations, direction, noise=known.noise, counted=known.counted)

    own = made(known.error)
    found = [] if always else describe(own)
    if known.nearest is None or not (always or any(s.beyond for s in found)):
        return found
    return describe(slopes.with_nearest(own, made(known.nearest())))


def _slopes(known: Known, own: Lanes) -> list[Statement]:
    rows, heads = own.rows.shape[1:]
    found = [_whole(known, own, "slope", "everything", "constant factor")]
    row = family(own.rows)
    if row is not None and rows > 1:
        at = row.worst()
        found.append(_statement("slope_row", row, at, own.rows, f"row {at // heads}", "one row", at // heads))
    column = family(own.columns, alike=known.alike)
    width = own.columns.shape[-1]
    if column is not None and width * heads > 1:
        at = column.worst()
        name = f"column {at % width}" + (f" of head {at // width}" if heads > 1 else "")
        found.append(_statement("slope_column", column, at, own.columns, name, "one column"))
    if own.tiles is not None:
        tile = family(own.tiles, alike=known.alike)
        if tile is not None:
            at = tile.worst()
            first = at // own.tiles.shape[-1] * slopes.TILE
            found.append(_statement("slope_tile", tile, at, own.tiles, f"a tile from row {first}", "one tile", first))
    if heads > 1:
        found += _per_head(known, own, "slope_head", "")
    for name, numbers in known.groups:
        found += _grouped(known, own, f"slope_{name}", name, numbers)
    return [s for s in found if s is not None]


def _directions(known: Known, own: Lanes, parameter: Parameter) -> list[Statement]:
    pattern = f"wrong {parameter.words}"
    found = [_whole(known, own, f"direction_{parameter.name}", parameter.words, pattern)]
    if parameter.per_head and own.rows.shape[2] > 1:
        found += _per_head(known, own, f"direction_{parameter.name}_head", f"{parameter.words} of ")
    return [_at_least(s, slopes.LEAST_PARAMETER) for s in found if s is not None]


def _rounded(known: Known, own: Lanes, rounding: Unclaimed) -> list[Statement]:
    words = f"rounded at '{rounding.point}', unclaimed"
    found = _whole(known, own, f"rounding_{rounding.point}", words, words)
    return [] if found is None else [_at_least(found, LEAST_ROUNDING)]


def _at_least(s: Statement, least: float) -> Statement:
    """The statement, which is no finding below `least`, however significant."""
    power = max(s.power, least)
    if abs(s.amplitude) > least:
        return replace(s, power=power)
    return replace(s, power=power, significance=min(s.significance, s.limit))


def _whole(known: Known, own: Lanes, key: str, subject: str, pattern: str) -> Statement | None:
    everything = torch.zeros(own.rows.shape[1:], dtype=torch.int64, device=own.rows.device)
    found = over_rows(own.rows, everything, 1, alike=known.alike)
    if known.coupled:  # heads are independent of each other, rows are not
        found = over_rows(own.rows.sum(1, keepdim=True), everything[:1], 1)
    return None if found is None else _statement(key, found, 0, own.rows, subject, pattern)


def _per_head(known: Known, own: Lanes, key: str, of: str) -> list[Statement]:
    rows, heads = own.rows.shape[1:]
    group = torch.arange(heads, device=own.rows.device).expand(rows, heads)
    found = over_rows(own.rows, group, heads, coupled=known.coupled, alike=known.alike)
    if found is None:
        return []
    at = found.worst()
    sums = own.rows.sum(1)
    return [_statement(key, found, at, sums, f"{of}head {at}", f"wrong {of}one head" if of else "one head")]


def _grouped(known: Known, own: Lanes, key: str, name: str, numbers: torch.Tensor) -> list[Statement]:
    count = int(numbers.max()) + 1 if numbers.numel() else 0
    group = numbers[:, None].expand(own.rows.shape[1:])
    found = over_rows(own.rows, group, count) if count > 1 and not known.coupled else None
    if found is None:
        return []
    at = found.worst()
    first = int((numbers == at).nonzero()[0])
    sums = own.rows.new_zeros(own.rows.shape[0], count).index_add_(1, numbers, own.rows.sum(2))
    return [_statement(key, found, at, sums, f"{name} number {at}", f"one {name}", first)]


def _statement(
    key: str,
    found: Projection,
    at: int,
    sums: torch.Tensor,
    subject: str,
    pattern: str,
    row: int | None = None,
) -> Statement:
    flat = sums.reshape(sums.shape[0], -1)
    square = float(flat[slopes.SQUARE].sum() if found.amplitude.numel() == 1 else flat[slopes.SQUARE, at])
    amplitude = float(found.amplitude[at])
    return Statement(
        key,
        float(found.significance[at]),
        float(found.limit[at]),
        amplitude,
        float(found.spread[at]),
        float((found.limit * found.spread + found.amplitude.abs()).max()),
        amplitude**2 * square,
        subject,
        pattern,
        row,
    )


def best_explanation(statements: Iterable[Statement], excess: float) -> Statement | None:
    """The statement that explains most of the excess of squared z, if it explains half of it; a parameter goes before
    a plain factor, and what concerns everything before a part, where they explain as much. A parameter that would have
    to be wrong by more than LARGEST is none: so far a finite difference does not reach."""
    told = [
        s
        for s in statements
        if s.explained >= EXPLAINS * max(excess, 0.0)
        and s.significance > slopes.WHOLE_LIMIT
        and not (s.key.startswith("direction") and abs(s.amplitude) > LARGEST)
    ]

    def rank(s: Statement) -> tuple[float, bool, bool]:
        return round(s.explained / max(excess, 1.0), 1), s.key.startswith("direction"), s.row is None

    return max(told, key=rank, default=None)
