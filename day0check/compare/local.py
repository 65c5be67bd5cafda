"""Local replay: a recorder observer that judges every operator call on the arguments that the candidate itself used.

The candidate never sees a change: arguments are copied before the call, results before they can be overwritten, and
everything is computed beside it without gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from day0check.compare.choices import judge_choice
from day0check.compare.compute import judge_compute
from day0check.compare.exact import Decoded, judge_conversion, judge_exact, judge_write
from day0check.compare.forms import beside_other_forms
from day0check.compare.judgement import Judgement, merge
from day0check.compare.owned_pools import logical
from day0check.compare.places import Places, begins_of
from day0check.compare.pooling import Seen, copied, held, joined, signature
from day0check.compare.quantise import judge_calibrated, judge_quantiser
from day0check.compare.replay import Replay, named
from day0check.compare.resample import judge_resampled
from day0check.compare.rounding import dtype_name
from day0check.compare.row_digest import hexadecimal, plain_weights, row_weights, weighted_sum
from day0check.contracts import CONTRACTS
from day0check.contracts.contract import Contract
from day0check.contracts.profiles import FP8_CACHES, NARROWED, STATES, Profile, quantiser_profile
from day0check.probe.fused_sums import gathers_itself
from day0check.probe.recorder import Call, Observer
from day0check.probe.rows import PADDING, RowMap
from day0check.types import Measure

POOLED_STEPS = 32
OF_ALL_ROWS = ("whole", "slope")  # statistics of a judgement to which every row contributes
THOROUGH_EVERY = 3  # of an operator's taps in a phase: parameters are estimated even where nothing is conspicuous
POOLED_BYTES = 256 * 2**20
# What a fused kernel gets in place of gathered keys: those that it picks, or all of a request (values are columns).
PICKED = ("pool", "table", "owner", "indices")
HISTORY = ("pool", "table", "value_width")
RAISED = Judgement(
    0, 0, {"raised": 1.0}, {"raised": 0.0}, "raised", pattern="raised", message="the operator raised an error"
)


@dataclass
class _Tally:
    """All judgements of one tap in one phase so far."""

    tap: str
    operator: str
    kind: str
    phase: str
    layer: int | None
    order: int
    thorough: bool
    judgement: Judgement | None = None
    failed_at: int | None = None
    request: str | None = None
    position: int | None = None
    digest: int = 0
    has_digest: bool = False
    waiting: dict[tuple[Any, ...], list[Seen]] = field(default_factory=dict)
    places: Places = field(default_factory=Places)

    def measure(self, page: int | None = None) -> Measure:
        j = self.judgement if self.judgement is not None else Judgement(0, 0, not_judged="never judged")
        return Measure(
            tap=self.tap,
            operator=self.operator,
            kind=self.kind,
            phase=self.phase,
            layer=self.layer,
            order=self.order if self.failed_at is None else self.failed_at,
            rows=j.rows,
            elements=j.elements,
            passed=j.passed,
            statistics=dict(j.statistics),
            limits=dict(j.limits),
            failing=j.failing,
            request=self.request,
            position=self.position,
            pattern=j.pattern,
            message="; ".join(text for text in (j.message, "" if j.passed else self.places.in_words(page)) if text),
            digest=hexadecimal(self.digest) if self.has_digest else "",
            power=j.power,
            not_judged=j.not_judged,
        )


@dataclass(frozen=True)
class _Before:
    contract: Contract | None
    arguments: dict[str, Any]
    problem: str = ""


class Judge(Observer):
    """Judges calls as they happen and gives `sink` one Measure per (tap, phase) at the end of the case.

    A judgement that fails is given at once as well, so that an abort loses nothing: of several Measures of one
    (tap, phase) the last counts. Prefill is judged call by call; the calls of a tap in decode wait for up to 32 steps
    and are judged together. `claims_tie_rule`: selections must follow the contract's tie rule to the index.
    `of_rank`: this process is one rank of several, and sums that gather their parts themselves are judged elsewhere.
    Deterministic: the draws of a judgement depend on `seed`, the tap, the phase and their number.
    """

    def __init__(
        self,
        profile: Profile,
        sink: Callable[[Measure], None],
        *,
        seed: int = 0,
        claims_tie_rule: bool = True,
        of_rank: bool = False,
    ) -> None:
        self.profile, self.sink, self.seed, self.claims_tie_rule = profile, sink, seed, claims_tie_rule
        self.of_rank = of_rank
        self._tallies: dict[tuple[str, str], _Tally] = {}
        self._decoded = Decoded()
        self._steps_waiting = self._bytes_waiting = 0
        # by id of the map, which is kept so that its id stays its own
        self._weights: dict[int, tuple[RowMap, torch.Tensor]] = {}
        self._begins: dict[int, tuple[RowMap, dict[str, int]]] = {}
        self._explained: set[tuple[str, str]] = set()  # operators and phases whose failure was tried as another form
        self._open: tuple[Call, Contract | None] | None = None  # begun and not come back
        self._page: int | None = None  # positions on a page of the caches

    # ------------------------------------------------------------------------------------------------ the recorder

    def before(self, call: Call) -> _Before:
        self._close_raised()
        contract = CONTRACTS.get(call.operator)
        self._open = (call, contract)
        if call.operator == "kv.slots" and not call.site and isinstance(call.kwargs.get("page"), int):
            self._page = call.kwargs["page"]
        if self._joined(call, contract):
            return _Before(contract, {})
        if contract is None:
            return _Before(None, {}, f"there is no contract for {call.operator}")
        try:
            with torch.no_grad():
                arguments = named(contract, call.args, _uncovered(contract, call.kwargs))
                return _Before(contract, copied(contract, arguments))
        except Exception as error:  # whatever is wrong with the call is a result of the check, never our own fault
            return _Before(contract, {}, f"{type(error).__name__}: {error}")

    def _joined(self, call: Call, contract: Contract | None) -> bool:
        """Whether a call is judged where the records of all ranks are joined, by what it is or because it gathers."""
        return contract is not None and (contract.joined or (self.of_rank and gathers_itself(call)))

    def after(self, call: Call, token: _Before, results: tuple[Any, ...]) -> None:
        self._open = None
        if self._joined(call, token.contract):
            return  # judged where the records of all ranks are joined
        tally = self._tally(call, token.contract)
        if token.problem:
            self._record(tally, [Judgement(0, 0, not_judged=token.problem)], [], call.order)
            return
        if not all(isinstance(r, torch.Tensor) for r in results):
            self._record(tally, [Judgement(0, 0, not_judged="a result is not a tensor")], [], call.order)
            return
        seen = Seen(token.contract, token.arguments, results, call.rows, call.order, call.step)
        key = signature(seen) if call.phase == "decode" else None
        if key is None:
            self._judge(tally, [seen])
            return
        seen = held(seen)
        tally.waiting.setdefault(key, []).append(seen)
        self._bytes_waiting += seen.byte_count

    def end_step(self, step: int) -> None:
        self._weights.clear()
        self._begins.clear()
        if not self._bytes_waiting:
            return
        self._steps_waiting += 1
        if self._steps_waiting >= POOLED_STEPS or self._bytes_waiting >= POOLED_BYTES:
            self._judge_waiting()

    def end_case(self) -> None:
        self._close_raised()
        self._judge_waiting()
        self._weights.clear()
        for tally in sorted(self._tallies.values(), key=lambda t: t.order):
            self.sink(tally.measure(self._page))
        self._tallies.clear()

    # -------------------------------------------------------------------------------------------------- judgements

    def _close_raised(self) -> None:
        """A call that another one follows, or the end, without having come back, has raised."""
        if self._open is not None:
            (call, contract), self._open = self._open, None
            self._record(self._tally(call, contract), [RAISED], [], call.order)

    def _tally(self, call: Call, contract: Contract | None) -> _Tally:
        key = (call.tap, call.phase)
        if key not in self._tallies:
            kind = "compute" if contract is None else contract.kind
            before = sum(t.operator == call.operator and t.phase == call.phase for t in self._tallies.values())
            thorough = before % THOROUGH_EVERY == 0
            self._tallies[key] = _Tally(call.tap, call.operator, kind, call.phase, call.layer, call.order, thorough)
        return self._tallies[key]

    def _judge_waiting(self) -> None:
        for tally in list(self._tallies.values()):
            waiting, tally.waiting = tally.waiting, {}
            for calls in waiting.values():
                self._judge(tally, calls)
        self._steps_waiting = self._bytes_waiting = 0

    def _judge(self, tally: _Tally, calls: list[Seen]) -> None:
        try:
            with torch.no_grad():
                replay, results = joined(calls)
                replay = Replay(replay.contract, logical(dict(replay.arguments)))
                judgements = self._judgements(tally, calls, replay, results)
                self._digest(tally, calls)
        except Exception as error:  # a replay that raises judges nothing; the reason is the result
            judgements = [Judgement(0, 0, not_judged=f"the replay raised {type(error).__name__}: {error}")]
        self._record(tally, judgements, calls, calls[0].order)

    def _judgements(
        self, tally: _Tally, calls: list[Seen], replay: Replay, results: tuple[torch.Tensor, ...]
    ) -> list[Judgement]:
        contract = replay.contract
        if contract.mutates:
            return [self._kept_as_claimed(tally, replay, j) for j in judge_write(replay)]
        if contract.name == "quantise.rows":
            return [self._as_claimed(tally, j) for j in judge_quantiser(replay.arguments["x"], results)]
        if contract.name == "kv.quantise":
            found = judge_calibrated(replay.arguments["x"], results, replay.arguments["scale"])
            return [self._as_claimed(tally, j) for j in found]
        if contract.name == "moe.convert":
            return judge_conversion(replay, results, self._decoded)
        if contract.kind in ("exact", "move"):
            return judge_exact(replay, results)
        keep = _rows_that_count(calls, replay)
        if contract.kind == "choose":
            return judge_choice(replay, results, claims_tie_rule=self.claims_tie_rule, keep=keep)
        if contract.name in self.profile.resample and (levels := judge_resampled(replay, results)) is not None:
            return levels
        draw = self._draw(tally, calls[0].order)
        judged = judge_compute(replay, results, self.profile, seed=draw, keep=keep, thorough=tally.thorough)
        failed, at = not all(j.passed for j in judged), (tally.operator, tally.phase)
        first = tally.judgement is None  # one call of a tap tells whether a tighter form fits
        if tally.failed_at is None and ((tally.thorough and first) or (failed and at not in self._explained)):
            self._explained |= {at} if failed else set()
            return beside_other_forms(judged, replay, results, self.profile, seed=draw, keep=keep)
        return judged

    def _as_claimed(self, tally: _Tally, judgement: Judgement) -> Judgement:
        """A quantiser is no finding of its own where the profile claims that it quantises; alone it is always tried."""
        site = tally.tap.partition("quantise.rows.")[2] if tally.operator == "quantise.rows" else tally.operator
        operator, fitting = quantiser_profile(site)
        claimed = self.profile.inputs if operator not in CONTRACTS else operator in self.profile.inputs
        if claimed or not judgement.passed or tally.tap.startswith("operators."):
            return judgement
        what = "the cache is" if operator in FP8_CACHES else "activations are"
        message = (
            f"{what} quantised, which profile {self.profile.name} does not claim; consistent with profile {fitting}"
        )
        return _unclaimed(judgement, message)

    def _kept_as_claimed(self, tally: _Tally, replay: Replay, judgement: Judgement) -> Judgement:
        """A state written into narrower memory is rounded there: right in its bytes, and a finding where unclaimed."""
        if tally.operator != "state.store" or tally.tap.startswith("operators.") or not judgement.passed:
            return judgement
        memory, value = replay.arguments["pool"].dtype, replay.arguments["value"].dtype
        site = tally.tap.rpartition(".")[2]
        claimed = self.profile.points_of("kda.attention").get("kept") if site == "kda" else None
        if memory.itemsize >= value.itemsize:
            return judgement
        judgement = replace(judgement, statistics=judgement.statistics | {NARROWED: 1.0})
        if claimed == dtype_name(memory):
            return judgement
        message = (
            f"states of {dtype_name(value)} are kept in {dtype_name(memory)}, which profile {self.profile.name} does "
            f"not claim" + (f"; consistent with profile {STATES}" if (site, memory) == ("kda", torch.bfloat16) else "")
        )
        return _unclaimed(judgement, message)

    def _draw(self, tally: _Tally, order: int) -> int:
        text = f"{self.seed}/{tally.tap}/{tally.phase}/{order}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "little")

    def _record(self, tally: _Tally, judgements: list[Judgement], calls: list[Seen], order: int) -> None:
        tally.places.see(calls, judgements, self._begins_of)
        for judgement in judgements:
            earlier = tally.judgement
            tally.judgement = judgement if earlier is None else merge(earlier, judgement)
            if judgement.passed or tally.failed_at is not None:
                continue
            tally.failed_at = order
            if calls:
                tally.failed_at, tally.request, tally.position = _address(calls, judgement)
            self.sink(tally.measure(self._page))

    def _digest(self, tally: _Tally, calls: list[Seen]) -> None:
        for seen in calls:
            for number, result in enumerate(seen.results):
                count = result.shape[0] if result.dim() else 1
                if len(seen.rows) == count:
                    weights = self._weights_of(seen.rows)
                else:
                    weights = plain_weights(count, seen.order)
                unordered = seen.contract.kind == "choose" and result.dim() == 2
                tally.digest += (2 * number + 1) * weighted_sum(result, weights, unordered=unordered)
                tally.has_digest = True

    def _begins_of(self, rows: RowMap) -> dict[str, int]:
        if id(rows) not in self._begins:
            self._begins[id(rows)] = (rows, begins_of(rows))
        return self._begins[id(rows)][1]

    def _weights_of(self, rows: RowMap) -> torch.Tensor:
        if id(rows) not in self._weights:
            self._weights[id(rows)] = (rows, row_weights(rows))
        return self._weights[id(rows)][1]


def _unclaimed(judgement: Judgement, message: str) -> Judgement:
    """A judgement that passed, as the finding that the profile claims nothing of the kind."""
    kept = {
        "statistics": judgement.statistics | {"unclaimed": 1.0},
        "limits": judgement.limits | {"unclaimed": 0.0},
    }
    return replace(judgement, failing="unclaimed", row=0, pattern="another profile", message=message, **kept)


def _uncovered(contract: Contract, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keywords of a fused kernel as those of the plain operator: what it gathers itself is gathered here first.

    Raises ValueError for an operator that cannot be replayed in this form.
    """
    names = {a.name for a in contract.args}
    if "pool" in names or "pool" not in kwargs:
        return kwargs
    if {"keys", "valid"} <= names:
        form, gathered_to = PICKED, "keys and valid"
    elif {"keys", "values", "owner", "visible"} <= names:
        form, gathered_to = HISTORY, "keys and values"
    else:
        raise ValueError(f"{contract.name} cannot be replayed with a pool")
    if not {*form, *(names & {"owner", "visible"})} <= set(kwargs):
        raise ValueError(f"{contract.name} with a pool needs {', '.join(form)} in place of {gathered_to}")
    plain = {name: value for name, value in kwargs.items() if name not in form}
    return plain | (_picked(kwargs) if form is PICKED else _history(contract, kwargs))


def _picked(kwargs: dict[str, Any]) -> dict[str, Any]:
    """keys [rows, k, width] and valid [rows, k] at the `indices` of each row."""
    from reference.cache import gather

    gathered = logical({name: kwargs[name] for name in PICKED})
    return {"keys": gather(gathered.pop("pool"), **gathered), "valid": kwargs["indices"] >= 0}


def _history(contract: Contract, kwargs: dict[str, Any]) -> dict[str, Any]:
    """keys and values of every position that any row sees: keys [batch, n, 1, width] with the values in their first
    `value_width` columns, or those of each key head, [batch, n, Hk, value_width], of rows [key | value]."""
    from reference.cache import gather

    table, visible = kwargs["table"], kwargs["visible"]
    count = int(visible.max().clamp(min=0)) if visible.numel() else 0
    every = torch.arange(table.shape[0], device=table.device)
    history = torch.arange(count, device=table.device).expand(table.shape[0], count)
    pool = logical({"pool": kwargs["pool"], "table": table})
    rows, width = gather(pool["pool"], table=pool["table"], owner=every, indices=history), kwargs["value_width"]
    if contract.name == "gqa.attention":
        keys, values = rows.unflatten(-1, (-1, 2 * width)).split(width, -1)
        return {"keys": keys, "values": values}
    keys = rows.unsqueeze(2)
    return {"keys": keys, "values": keys[..., :width]}


def _rows_that_count(calls: list[Seen], replay: Replay) -> torch.Tensor | None:
    """bool [rows] that is False for padding rows, None when there are none."""
    first = replay.arguments[replay.contract.args[0].name]
    owners = [owner for seen in calls for owner in seen.rows.owner]
    if PADDING not in owners or len(owners) != first.shape[0]:
        return None
    return torch.tensor([owner != PADDING for owner in owners], device=first.device)


def _address(calls: list[Seen], judgement: Judgement) -> tuple[int, str | None, int | None]:
    """(execution order of the call, request, position) of a judgement's row; of the first call when it has none, and
    the order of the first where all rows together failed: the worst of them says nothing about when it began."""
    row = judgement.row
    if row is None:
        return calls[0].order, None, None
    for seen in calls:
        count = _axis_length(seen, judgement.axis)
        if row < count or seen is calls[-1]:
            order = calls[0].order if judgement.failing in OF_ALL_ROWS else seen.order
            return order, *_row_address(seen, judgement.axis, row, count)
        row -= count
    raise AssertionError("the last call always answers")


def _axis_length(seen: Seen, axis: str) -> int:
    for spec, result in zip(seen.contract.results, seen.results, strict=False):
        if spec.rows == axis and result.dim():
            return int(result.shape[0])
    return len(seen.rows)


def _row_address(seen: Seen, axis: str, row: int, count: int) -> tuple[str | None, int | None]:
    rows = seen.rows
    if axis == "batch":
        offsets = seen.arguments.get("offsets")
        if offsets is not None and row + 1 < len(offsets) and 0 < int(offsets[row + 1]) <= len(rows):
            return rows.address(int(offsets[row + 1]) - 1)
        last = [p for owner, p in zip(rows.owner, rows.position, strict=True) if owner == row]
        return (rows.requests[row], max(last, default=None)) if row < len(rows.requests) else (None, None)
    order = seen.arguments.get("order")
    if count != len(rows) and order is not None and len(order) == len(rows):
        choices = max(1, seen.arguments["weights"].shape[-1])
        at = (order // choices == row).nonzero().flatten()
        return rows.address(int(at[0])) if len(at) else (None, None)
    return rows.address(row) if count == len(rows) and row < count else (_sole_request(rows), None)


def _sole_request(rows: RowMap) -> str | None:
    """The request of a call whose rows all belong to one: its results need not be in the order of the rows."""
    owners = {owner for owner in rows.owner if owner != PADDING}
    return rows.requests[owners.pop()] if len(owners) == 1 else None
