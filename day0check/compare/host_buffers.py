"""Host buffers of a step's input: what is queued must be what arrives, whenever the copies are made.

The rows of every array are digested on the host where `batch.stage` is called and on the device where it gives its
results, in stream order; the two are held beside each other when the run is over, so nothing waits for the device
while copies are under way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from day0check.compare.replay import named
from day0check.contracts import CONTRACTS
from day0check.probe.digest import row_digests
from day0check.probe.recorder import Call, Observer
from day0check.types import Measure

OPERATOR = "batch.stage"
PATTERN = "other numbers than were queued"


@dataclass(frozen=True)
class _Staged:
    """One array of one call: its rows as queued and as arrived; `arrived` None: nothing of this name came."""

    call: Call
    name: str
    queued: torch.Tensor
    arrived: torch.Tensor | None


class HostBuffers(Observer):
    """Gives `sink` a Measure of kind "move" for each tap and phase of `batch.stage`, at the end of the case."""

    def __init__(self, sink: Callable[[Measure], None]) -> None:
        self.sink = sink
        self._staged: list[_Staged] = []

    def before(self, call: Call) -> dict[str, torch.Tensor] | None:
        if call.operator != OPERATOR:
            return None
        try:
            arguments = named(CONTRACTS[OPERATOR], call.args, call.kwargs)
        except ValueError:  # a call of another shape: the judged run says so
            return None
        results = {result.name for result in CONTRACTS[OPERATOR].results}
        return {name: row_digests(value) for name, value in arguments.items() if name in results}

    def after(self, call: Call, token: dict[str, torch.Tensor] | None, results: tuple[Any, ...]) -> None:
        if token is None:
            return
        light = Call(call.place, call.operator, call.site, call.phase, call.step, call.order, call.rows, (), {})
        there = {r.name: value for r, value in zip(CONTRACTS[OPERATOR].results, results, strict=False)}
        for name, queued in token.items():
            value = there.get(name)
            arrived = row_digests(value) if isinstance(value, torch.Tensor) else None
            self._staged.append(_Staged(light, name, queued, arrived))

    def end_case(self) -> None:
        by_tap: dict[tuple[str, str], list[_Staged]] = {}
        for staged in self._staged:
            by_tap.setdefault((staged.call.tap, staged.call.phase), []).append(staged)
        self._staged = []
        for arrays in by_tap.values():
            self.sink(_measure(arrays))


def _measure(arrays: list[_Staged]) -> Measure:
    first, wrong, at = arrays[0].call, 0, None
    for staged in arrays:
        rows = _wrong_rows(staged)
        wrong += len(rows)
        at = (staged, rows) if at is None and len(rows) else at
    call = first if at is None else at[0].call
    row = int(at[1][0]) if at is not None else 0
    of_rows = at is not None and len(at[0].queued) == len(call.rows)
    request, position = call.rows.address(row) if of_rows else (None, None)
    return Measure(
        tap=first.tap,
        operator=OPERATOR,
        kind="move",
        phase=first.phase,
        layer=first.layer,
        order=call.order,
        rows=sum(len(staged.queued) for staged in arrays),
        elements=sum(len(staged.queued) for staged in arrays),
        passed=not wrong,
        statistics={"rows_changed": float(wrong)},
        limits={"rows_changed": 0.0},
        failing="rows_changed" if wrong else "",
        request=request,
        position=position,
        pattern=PATTERN if wrong else "",
        message=_words(*at) if at is not None else "",
    )


def _wrong_rows(staged: _Staged) -> torch.Tensor:
    """Numbers of rows that arrived otherwise than they were queued."""
    if staged.arrived is None or staged.arrived.shape != staged.queued.shape:
        return torch.arange(max(1, len(staged.queued)))
    return (staged.arrived.cpu() != staged.queued.cpu()).nonzero().flatten()


def _words(staged: _Staged, rows: torch.Tensor) -> str:
    """The array and the step by name."""
    return (
        f"host buffer `{staged.name}` of step {staged.call.step}: {len(rows)} of {len(staged.queued)} rows arrived "
        "with other numbers than were queued"
    )
