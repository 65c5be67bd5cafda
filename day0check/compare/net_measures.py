"""Gathers what the net saw of one case, row by row, and turns it into one measure per (tap, phase)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from day0check.compare.computations import Computation
from day0check.compare.free_choices import FreeLimits, error_of_a_difference, given_up
from day0check.compare.locate import split_tap
from day0check.compare.logits import MARGIN_LIMIT, LogitRows, compare_logits, given_up_noises
from day0check.compare.net_noise import row_errors
from day0check.compare.propagated_choices import FORMS, LIMIT, Judged
from day0check.contracts import CONTRACTS
from day0check.snapshot import Rows, Snapshot
from day0check.types import Measure, Outputs, Request

WHOLE_LIMIT = 1.1  # of random rounding's own noise; nearest rounding stays near 0.7 (method.md, 5)
ROW_LIMIT = 30.0  # noises; rows are heavy-tailed: healthy ones reached 9 with a sharp softmax
SPREADS = 6.0
SMALL = 0.01  # of the noise: errors below are nothing
TOKENS = "sample.token"
LOGITS = "head.logits"


@dataclass
class _Group:
    """The rows of one (tap, phase): a list of column name -> [n] tensors, one dict per request."""

    tap: str
    operator: str
    order: int
    columns: int
    addresses: list[tuple[str, int]] = field(default_factory=list)
    parts: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def column(self, name: str) -> torch.Tensor:
        return torch.cat([part[name] for part in self.parts], dim=-1)


class CaseTable:
    """Rows of all requests of a case by (tap, phase). Keeps numbers per row, never the tensors. `free`: takes what the
    replicates show of choices that fall otherwise, where the candidate shows none of its own."""

    def __init__(self, snapshot: Snapshot, *, free: FreeLimits | None = None) -> None:
        self.snapshot, self.free = snapshot, free
        self._groups: dict[tuple[str, str], _Group] = {}
        self._now = Computation(snapshot)
        self._skipped: dict[str, str] = {}
        self._strayed: dict[str, torch.Tensor] = {}  # request -> noises of each row's error at the last tap, at least 1

    # ------------------------------------------------------------------------------------------- collecting

    def follow(self, request: str, computation: Computation) -> None:
        """What is added next is of this computation of `request`."""
        self._now = computation
        self._strayed.pop(request, None)

    def add_values(
        self, tap: str, operator: str, request: str, oracle: torch.Tensor, replicates: Sequence[torch.Tensor]
    ) -> None:
        """`oracle` and each of `replicates`: results [rows, ...] of one pass over the request."""
        vision, now = tap.startswith("vision."), self._now
        if vision and not now.last:
            return  # patches are those of one encoding
        recorded = now.view.recorded(tap, request, by_position=not vision)
        recorded = recorded if vision else now.judged(recorded)
        if not recorded.positions:
            return
        rows = self._align(tap, recorded, len(oracle), vision)
        if rows is None:
            return
        own, at = rows
        candidate = recorded.values[own].flatten(1).to(oracle.device)
        wanted = oracle[at].flatten(1)
        if candidate.shape != wanted.shape:
            self._skipped[tap] = f"its rows have {candidate.shape[1]} elements, the reference has {wanted.shape[1]}"
            return
        others = torch.stack([r[at].flatten(1).double() for r in replicates])
        errors = row_errors(wanted, candidate, others)
        if self.free is not None:
            self.free.see_rows(tap, wanted, others)
        columns = {
            "z": errors.z,
            "replicate_z": errors.replicate_z,
            "error": errors.error,
            "noise": errors.noise,
            "signal": errors.signal,
            "bad": (~errors.finite).double(),
        }
        if operator == LOGITS:
            found = compare_logits(wanted, candidate, others)
            explained = self.explained(request, len(oracle))[at]
            columns |= {
                "agrees": found.agrees.double(),
                "margin": self._margin(wanted, candidate, others, found, explained),
                "kl": found.kl,
                "noise_kl": found.noise_kl,
            }
        elif not vision:
            self.explained(request, len(oracle))[at] = errors.z.sqrt().clamp(min=1.0).cpu()
        self._add(tap, operator, request, recorded, own, columns, width=wanted.shape[1])

    def _margin(
        self,
        oracle: torch.Tensor,
        candidate: torch.Tensor,
        replicates: torch.Tensor,
        found: LogitRows,
        explained: torch.Tensor,
    ) -> torch.Tensor:
        if self.free is None:
            return found.margin / explained.to(found.margin.device)
        self.free.see_logits(oracle, replicates)
        best = candidate.double().nan_to_num(nan=-torch.inf).argmax(-1)
        return torch.where(
            torch.isinf(found.margin), torch.inf, given_up(oracle, best, error_of_a_difference(oracle, replicates))
        )

    def explained(self, request: str, length: int) -> torch.Tensor:
        """[length]: how many noises each row was off at the last tap, at least 1.

        What a row then chooses is judged in these: a row that strayed earlier is accused there, not at each choice.
        """
        return self._strayed.setdefault(request, torch.ones(length, dtype=torch.float64))

    def _align(self, tap: str, recorded: Rows, length: int, vision: bool) -> tuple[list[int], torch.Tensor] | None:
        """(indices of recorded rows, rows of the pass that they belong to)."""
        if vision:  # patches have no position of their own: all of them, in order
            if len(recorded.positions) != length:
                self._skipped[tap] = f"{len(recorded.positions)} rows recorded, the reference has {length}"
                return None
            return list(range(length)), torch.arange(length)
        own = [i for i, p in enumerate(recorded.positions) if p < length]
        return own, torch.tensor([recorded.positions[i] for i in own], dtype=torch.int64)

    def add_choices(
        self, tap: str, operator: str, request: str, recorded: Rows, rows: list[int], judged: Judged
    ) -> None:
        """`rows`: the recorded rows that `judged` is about, in its order."""
        here = [i for i, row in enumerate(rows) if recorded.positions[row] >= self._now.first]
        if not here:
            return
        columns = {
            "form": judged.form.double()[here],
            "regret": judged.regret.double()[here],
            "flips": judged.flips.double()[here],
            "noise_flips": judged.noise_flips[here],
        }
        own = [rows[i] for i in here]
        self._add(tap, operator, request, recorded, own, columns, width=recorded.values[0].numel())

    def add_tokens(self, request: Request, outputs: Outputs, oracle: torch.Tensor, replicates: torch.Tensor) -> None:
        """Tokens that the candidate chose freely at temperature 0, against the oracle's logits [rows, V]."""
        if request.temperature != 0 or any(request.forced):
            return
        if self.free is not None:
            self.free.see_logits(oracle, replicates)
        sequence = outputs.sequences[request.id]
        spans = outputs.generated.get(request.id, ())
        rows = [
            (p - 1, "prefill" if p == a else "decode") for a, b in spans for p in range(a, b) if 0 < p <= len(oracle)
        ]
        shown = self._now.tokens(request.id)
        rows = rows if shown is None else [row for row in rows if row[0] in shown]
        if not rows:
            return
        at = torch.tensor([row for row, _ in rows], device=oracle.device)
        tokens = torch.tensor([sequence[row + 1] for row, _ in rows], device=oracle.device)
        wide = oracle[at].double()
        if self.free is None:
            margin = given_up_noises(wide, tokens, replicates[:, at])
            margin = margin / self.explained(request.id, len(oracle)).to(at.device)[at]
        else:
            margin = given_up(wide, tokens, error_of_a_difference(oracle, replicates))
        recorded = Rows(tuple(row for row, _ in rows), tuple(phase for _, phase in rows), (), torch.empty(len(rows), 1))
        columns = {"agrees": (wide.argmax(-1) == tokens).double(), "margin": margin}
        self._add(TOKENS, TOKENS, request.id, recorded, list(range(len(rows))), columns, width=1)

    def add_missing(self, request: str, met: Sequence[str]) -> None:
        """Taps that the passes met and the candidate did not record; nothing to say when it records no tap at all."""
        known = self.snapshot.taps()
        for tap in met if known else ():
            if tap not in known:
                self._skipped.setdefault(tap, "the candidate did not record it")
            elif self.snapshot.dropped(tap):
                self._skipped.setdefault(tap, self.snapshot.dropped(tap))
            elif not self.snapshot.requests(tap):
                self._skipped.setdefault(tap, "its rows have no row map")

    def _add(
        self,
        tap: str,
        operator: str,
        request: str,
        recorded: Rows,
        rows: list[int],
        columns: dict[str, torch.Tensor],
        *,
        width: int,
    ) -> None:
        phases = [recorded.phases[i] for i in rows]
        columns = {name: value.cpu() for name, value in columns.items()}
        for phase in dict.fromkeys(phases):
            here = [i for i, p in enumerate(phases) if p == phase]
            order = min((recorded.orders[rows[i]] for i in here), default=0) if recorded.orders else 1 << 30
            group = self._groups.setdefault((tap, phase), _Group(tap, operator, order, width))
            group.order = min(group.order, order)
            group.addresses += [(request, recorded.positions[rows[i]]) for i in here]
            group.parts.append({name: value[..., here] for name, value in columns.items()})

    # --------------------------------------------------------------------------------------------- judging

    def measures(self) -> list[Measure]:
        """One measure per (tap, phase), in order of execution, and one for each tap that could not be judged."""
        free = self.free or FreeLimits()
        found = [_judge(group, phase, free) for (_, phase), group in self._groups.items()]
        found += [_not_judged(tap, self.snapshot, reason) for tap, reason in self._skipped.items()]
        return sorted(found, key=lambda m: (m.order, m.tap, m.phase))


def layer_of(tap: str) -> int | None:
    return int(tap.split(".")[1]) if tap.startswith("layers.") else None


def _not_judged(tap: str, snapshot: Snapshot, reason: str) -> Measure:
    operator = split_tap(tap)[1] or tap
    kind = CONTRACTS[operator].kind if operator in CONTRACTS else "compute"
    order = snapshot.first_order(tap)
    return Measure(tap, operator, kind, "prefill", layer_of(tap), order, 0, 0, False, not_judged=reason)


def _judge(group: _Group, phase: str, free: FreeLimits) -> Measure:
    names = group.parts[0]
    if "form" in names:
        return _judge_choices(group, phase)
    statistics: dict[str, float] = {}
    limits: dict[str, float] = {}
    rows = torch.zeros(0)
    if "z" in names:
        rows = _value_statistics(group, statistics, limits)
        limits["row"] = free.row_limit(group.tap, ROW_LIMIT)
    if "margin" in names:
        _logit_statistics(group, statistics, limits)
        limits["margin"] = free.margin_limit(MARGIN_LIMIT)
    failing = next((name for name in limits if not statistics[name] <= limits[name]), "")
    at = _address(group, failing, rows, limits)
    pattern, message = _in_words(failing, statistics, limits)
    return _measure(group, phase, statistics, limits, failing, at=at, pattern=pattern, message=message)


def _value_statistics(group: _Group, statistics: dict[str, float], limits: dict[str, float]) -> torch.Tensor:
    """Fills in the statistics of a travelling tensor; returns each row's error in noises [n]."""
    z, own = group.column("z"), group.column("replicate_z").mean(0)
    error, noise, signal = (float(group.column(name).sum()) for name in ("error", "noise", "signal"))
    rows = z.sqrt()
    statistics["non_finite"], limits["non_finite"] = float(group.column("bad").sum()), 0.0
    statistics["whole"] = typical_ratio(z, group.column("replicate_z"))
    statistics["energy"] = float((z.mean() / own.mean().clamp(min=1e-3)).sqrt())
    limits["whole"] = whole_limit(group.column("replicate_z"))
    statistics["row"] = float(rows.max())
    statistics["relative_l2"] = (error / max(signal, 1e-300)) ** 0.5
    statistics["noise_relative_l2"] = (noise / max(signal, 1e-300)) ** 0.5
    return rows


def typical_ratio(z: torch.Tensor, replicate_z: torch.Tensor) -> float:
    """Geometric mean over rows of the candidate's error over a replicate's; `z` [n], `replicate_z` [R, n] mean squares.

    A replicate among the others gives 1, whatever the rows' own noise is: no row decides alone, as it would in a mean.
    """
    noisy = (z > SMALL) | (replicate_z.mean(0) > SMALL)
    if not bool(noisy.any()):
        return 0.0
    logs = (z[noisy] + SMALL).log() - (replicate_z[:, noisy] + SMALL).log().mean(0)
    return float((logs.mean() / 2).exp())


def whole_limit(replicate_z: torch.Tensor) -> float:
    """Limit of `typical_ratio`: 1.1, and more where few rows let even a replicate stray further by chance.

    `SPREADS` spreads of the mean over rows of a log ratio, a row's spread taken from how far the replicates [R, n]
    disagree about it.
    """
    count, n = replicate_z.shape
    logs = (replicate_z + SMALL).log()
    row = float(logs.var(0).mean()) if count > 1 else 1.0
    spread = ((row + 0.5 / n) * (1 + 1 / count)) ** 0.5 / 2
    return max(WHOLE_LIMIT, math.exp(SPREADS * spread / n**0.5))


def _logit_statistics(group: _Group, statistics: dict[str, float], limits: dict[str, float]) -> None:
    margin = group.column("margin")
    statistics["margin"] = float(margin.max())
    statistics["top1_agreement"] = float(group.column("agrees").mean())
    diverging = [address[1] for address, ok in zip(group.addresses, group.column("agrees"), strict=True) if not ok]
    statistics["first_diverging_position"] = float(min(diverging, default=-1))
    if "kl" in group.parts[0]:
        statistics["kl"] = float(group.column("kl").mean())
        statistics["noise_kl"] = float(group.column("noise_kl").mean())


def _judge_choices(group: _Group, phase: str) -> Measure:
    form, regret = group.column("form"), group.column("regret")
    statistics = {
        "illegal": float((form > 0).sum()),
        "regret": float(torch.where(form > 0, 0.0, regret).max()),
        "flips": float(group.column("flips").sum()),
        "noise_flips": float(group.column("noise_flips").sum()),
    }
    limits = {"illegal": 0.0, "regret": LIMIT}
    failing = next((name for name in limits if not statistics[name] <= limits[name]), "")
    beyond = (form > 0) if failing == "illegal" else (regret > LIMIT)
    at = _lowest(group, beyond) if failing else None
    pattern, message = "", ""
    if failing == "illegal":
        pattern = FORMS[int(form[beyond][0]) - 1]
        message = f"{pattern}: {int(beyond.sum())} of {len(form)} rows"
    elif failing:
        pattern = "skips better keys" if group.operator == "dsa.select" else "skips better experts"
        message = (
            f"{pattern}: {int(beyond.sum())} of {len(form)} rows give up more than {LIMIT:g} score noises, "
            f"the worst {statistics['regret']:.3g}"
        )
    return _measure(group, phase, statistics, limits, failing, at=at, pattern=pattern, message=message)


def _lowest(group: _Group, beyond: torch.Tensor) -> int | None:
    """The row with the lowest position among those of the first request that has one beyond its limit."""
    rows = beyond.nonzero().flatten().tolist()
    if not rows:
        return None
    first = group.addresses[rows[0]][0]
    return min((r for r in rows if group.addresses[r][0] == first), key=lambda r: group.addresses[r][1])


def _address(group: _Group, failing: str, rows: torch.Tensor, limits: Mapping[str, float]) -> int | None:
    if not failing:
        return None
    if failing == "non_finite":
        return _lowest(group, group.column("bad") > 0)
    if failing == "margin":
        return _lowest(group, group.column("margin") > limits["margin"])
    if failing == "row":
        return _lowest(group, rows > limits["row"])
    return int(rows.argmax())


def _in_words(failing: str, statistics: dict[str, float], limits: dict[str, float]) -> tuple[str, str]:
    if not failing:
        return "", ""
    value, limit = statistics[failing], limits[failing]
    return {
        "non_finite": ("nan", f"{value:.0f} rows hold NaN or infinity where the oracle is finite"),
        "row": ("one row", f"a row is {value:.3g} noises from the oracle, limit {limit:.3g}"),
        "margin": (
            "another token",
            f"a token gives up {value:.3g} logit noises against the oracle's, limit {limit:.3g}",
        ),
        "whole": (
            "whole",
            f"the error is {value:.3g} times the noise of random rounding, limit {limit:.3g} "
            f"(relative error {statistics.get('relative_l2', 0):.2g}, "
            f"noise {statistics.get('noise_relative_l2', 0):.2g})",
        ),
    }[failing]


def _measure(
    group: _Group,
    phase: str,
    statistics: dict[str, float],
    limits: dict[str, float],
    failing: str,
    *,
    at: int | None,
    pattern: str,
    message: str,
) -> Measure:
    request, position = group.addresses[at] if at is not None else (None, None)
    power = None
    if "noise_relative_l2" in statistics:  # a common factor adds to the noise as the square
        room = max(limits["whole"] ** 2 - statistics["whole"] ** 2, 0.0)
        power = statistics["noise_relative_l2"] * room**0.5
    return Measure(
        tap=group.tap,
        operator=group.operator,
        kind=CONTRACTS[group.operator].kind,
        phase=phase,
        layer=layer_of(group.tap),
        order=group.order,
        rows=len(group.addresses),
        elements=len(group.addresses) * group.columns,
        passed=not failing,
        statistics=statistics,
        limits=limits,
        failing=failing,
        request=request,
        position=position,
        pattern=pattern,
        message=message,
        power=power,
    )
