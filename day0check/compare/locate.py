"""Joins measures into findings, one per (check, operator, layer class, phase, pattern), and names the first fault."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from day0check.compare.places import growth
from day0check.contracts import CONTRACTS
from day0check.types import Finding, Measure, finding_id

if TYPE_CHECKING:
    from reference.config import ModelConfig

# order of accusation among items of one call (method.md, 7); with other weights no result can be right
LOCAL = ("parameters", "exact", "move", "choose", "compute")
NET = ("propagated", "logits")
ORDER = (*LOCAL, "candidate", *NET)
MODEL = ("weights",)  # asked before anything runs: on weights of another model nothing else says much
_LISTED = 16  # taps named in the evidence of one finding
_NEIGHBOURS = 3
SPREADS, ALIKE = 6.0, 2.0  # of an error of a parameter that one layer shows and others prove
LEAST_LAYERS = 4  # that must be wrong before anything is said of their order


def split_tap(tap: str) -> tuple[str, str | None]:
    """(place, operator) of a tap by the names of the contracts; (tap, None) when it holds none."""
    parts = tap.split(".")
    for i in range(len(parts) - 1):
        name = f"{parts[i]}.{parts[i + 1]}"
        if name in CONTRACTS:
            return ".".join(parts[:i]), name
    return tap, None


def drafting_place(taps: Iterable[str]) -> str:
    """The place of the layer that embeds tokens of its own: it drafts, so that its row p has seen token p + 1 (model.md
    2.8). Empty when none of the taps is of such a layer."""
    return next((place for place, operator in map(split_tap, taps) if operator == "embed.tokens" and place), "")


def layer_class(measure: Measure, config: ModelConfig | None) -> str:
    """The class that findings share: attention and feed-forward kind of a decoder layer, "vision", or ""."""
    if measure.layer is not None and config is not None and measure.layer < len(config.layers):
        return config.layer_class(measure.layer)
    return "vision" if measure.tap.startswith("vision.") else ""


def where_in_words(measure: Measure) -> str:
    """Operator, layer, phase, request and position as the beginning of a sentence."""
    place, _, site = measure.tap.partition(measure.operator)
    place, site = place.strip("."), site.strip(".")
    if measure.layer is not None:
        place = f"layer {measure.layer}"
    head = f"{measure.operator}{f' ({site})' if site else ''}{f' in {place}' if place else ''} ({measure.phase})"
    if measure.request is not None:
        head += f", request {measure.request}"
    if measure.position is not None:
        head += f", position {measure.position}"
    return head


def number(value: float | None) -> str:
    """Four significant digits, plain for the sizes that people read."""
    return "unknown" if value is None else f"{value:.4g}"


def findings_from(
    check: str, measures: Iterable[Measure], config: ModelConfig | None, *, context: Iterable[Measure] = ()
) -> tuple[Finding, ...]:
    """One finding for each (operator, layer class, phase, pattern) among the measures that fail.

    Measures that were not judged are no findings. The measure with the smallest `order` gives the address; the others
    are listed in `evidence`. `context` (default: the measures themselves) is where passing neighbours are looked up.
    Findings are sorted by that order.
    """
    measures = tuple(measures)
    context = tuple(context) or measures
    groups: dict[tuple[str, str, str, str], list[Measure]] = {}
    for m in measures:
        if not m.passed and not m.not_judged:
            key = (m.operator, layer_class(m, config), m.phase, m.pattern or m.failing)
            groups.setdefault(key, []).append(m)
    found = [_finding(check, key, members, context, config) for key, members in groups.items()]
    return tuple(sorted(found, key=lambda f: (f.evidence["order"], f.operator or "", f.id)))


def _finding(
    check: str,
    key: tuple[str, str, str, str],
    members: list[Measure],
    context: Sequence[Measure],
    config: ModelConfig | None,
) -> Finding:
    operator, kind_of_layer, phase, pattern = key
    members = sorted(members, key=lambda m: (m.order, m.tap))
    first = members[0]
    begins = same_error_before(members, [m for m in context if layer_class(m, config) == kind_of_layer])
    if begins is not None:
        told = f"{_same_error(begins, first)}: {first.message}"
        address = {"tap": begins.tap, "layer": begins.layer, "order": begins.order, "message": told}
        first = replace(first, request=None, position=None, **address)
        members = [first, *members]
    value, limit = first.statistics.get(first.failing), first.limits.get(first.failing)
    evidence: dict[str, Any] = {
        "tap": first.tap,
        "order": first.order,
        "pattern": pattern,
        "layer_class": kind_of_layer,
        "statistic": first.failing,
        "statistics": dict(sorted(first.statistics.items())),
        "limits": dict(sorted(first.limits.items())),
        "rows": first.rows,
        "taps": [m.tap for m in members[:_LISTED]],
        "tap_count": len(members),
        "layers": sorted({m.layer for m in members if m.layer is not None}),
        "ruled_out": ruled_out(first, context),
    }
    if first.rank is not None:
        evidence["rank"] = first.rank
    return Finding(
        id=finding_id(check, operator, kind_of_layer, phase, pattern),
        severity="blocker",
        check=check,
        operator=operator,
        message=_message(first, pattern, value, limit, len(members)) + _with_depth(members),
        layer=first.layer,
        phase=first.phase,
        request=first.request,
        position=first.position,
        value=value,
        limit=limit,
        power=first.power,
        evidence=evidence,
    )


def same_error_before(members: Sequence[Measure], context: Iterable[Measure]) -> Measure | None:
    """The earliest of the measures before `members` that passed and has their error: too little to be told from its own
    few rows, and what other layers prove.

    Two members or more must name one parameter, wrong by more than SPREADS spreads; so must the measure, by as much
    within a factor of ALIKE (method.md, 1: spreads of directions are pooled over the layers of an operator).
    """
    named = [k for k in members[0].statistics if k.startswith("error_") and all(k in m.statistics for m in members)]
    shared = [k for k in named if all(_spreads(m, k) > SPREADS for m in members)] if len(members) > 1 else []
    found = []
    for m in context:
        if not (m.passed and (m.operator, m.phase) == (members[0].operator, members[0].phase)):
            continue
        alike = [k for k in shared if _spreads(m, k) > SPREADS and _alike(m.statistics[k], members, k)]
        if alike and m.order < members[0].order and _site(m) == _site(members[0]):
            found.append(m)
    return min(found, key=lambda m: m.order, default=None)


def _site(measure: Measure) -> str:
    return measure.tap.partition(measure.operator)[2]


def _spreads(measure: Measure, error: str) -> float:
    return measure.statistics.get(error.replace("error_", "direction_", 1), 0.0) if error in measure.statistics else 0.0


def _alike(size: float, members: Sequence[Measure], error: str) -> bool:
    sizes = sorted(m.statistics[error] for m in members)
    middle = sizes[len(sizes) // 2]
    return middle / ALIKE <= size <= middle * ALIKE


def _same_error(begins: Measure, first: Measure) -> str:
    """The beginning of the message of a finding that is placed before the first measure that failed."""
    sizes = {k: _spreads(begins, k) for k in begins.statistics if k.startswith("error_")}
    largest = max(sizes, key=sizes.__getitem__)
    name, size = largest.removeprefix("error_"), 100 * begins.statistics[largest]
    return (
        f"its {name} is wrong by {size:.3g}%, {sizes[largest]:.3g} spreads, which its {begins.rows} rows alone do not "
        f"prove; what does is {where_in_words(replace(first, request=None, position=None))}"
    )


def _message(first: Measure, pattern: str, value: float | None, limit: float | None, count: int) -> str:
    what = first.message or pattern or "is beyond its limit"
    where = where_in_words(first)
    text = what if what.startswith(first.operator) else f"{where}: {what}"
    if limit is not None and value is not None and "limit" not in text:
        text += f" ({first.failing} {number(value)}, limit {number(limit)})"
    if count > 1:
        text += f"; the same at {count - 1} more tap{'s' if count > 2 else ''}"
    return text


def _with_depth(members: Sequence[Measure]) -> str:
    """Whether the statistic that decided grows from layer to layer, as the end of a message; every layer once."""
    sizes: dict[int, float] = {}
    for m in members:
        if m.layer is not None and m.failing == members[0].failing and m.failing in m.statistics:
            sizes[m.layer] = max(m.statistics[m.failing], sizes.get(m.layer, 0.0))
    grown = growth(sizes, "depth", LEAST_LAYERS)
    return f"; {grown}, layers {min(sizes)} to {max(sizes)}" if grown else ""


def ruled_out(first: Measure, context: Iterable[Measure]) -> list[dict[str, Any]]:
    """The passing measures just before `first` in order of execution and in its phase, nearest first, with figures."""
    before = [m for m in context if m.passed and m.phase == first.phase and m.order < first.order]
    before.sort(key=lambda m: (-m.order, m.tap))
    return [_figures(m) for m in before[:_NEIGHBOURS]]


def _figures(m: Measure) -> dict[str, Any]:
    closest = max(
        (k for k in m.limits if k in m.statistics and m.limits[k] > 0 and math.isfinite(m.statistics[k])),
        key=lambda k: (m.statistics[k] / m.limits[k], k),
        default=None,
    )
    row: dict[str, Any] = {"tap": m.tap, "phase": m.phase, "kind": m.kind}
    if closest is not None:
        row |= {"statistic": closest, "value": m.statistics[closest], "limit": m.limits[closest]}
    return row


def first_fault(findings: Iterable[Finding], order: Sequence[str] = ORDER) -> Finding | None:
    """The finding to repair first, or None when no unwaived blocker is among `findings`.

    Faults of the checkpoint come first, then local items, the earliest in order of execution; then a candidate that
    died (what was judged before it died passed); then the net. `order` decides between checks of one call; ties go to
    the finding that comes first.
    """
    blockers = [f for f in findings if f.severity == "blocker" and not f.waived]
    return min(blockers, key=lambda f: _accusation(f, order), default=None)


def _accusation(finding: Finding, order: Sequence[str]) -> tuple[int, float, int]:
    check = finding.check
    rank = order.index(check) if check in order else len(order)
    group = -1 if check in MODEL else 0 if check in LOCAL else 2 if check in NET else 1
    return group, float(finding.evidence.get("order", math.inf)), rank
