"""The bank of attention residuals between its calls: what a block wrote must still be there when a mix reads it.

Each call by itself may be right: the store writes its slot, the mix computes from the sources that it got. A slot that
changes in between (a buffer that doubles as something else) shows in neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from day0check.probe.digest import digest_lanes, hexadecimal
from day0check.probe.recorder import Call, Observer
from day0check.types import Measure

STORE, MIX = "residual.store", "residual.mix"
PATTERN = "overwritten after it was stored"


@dataclass(frozen=True)
class _Stored:
    """A slot as it was when its store came back. `rows`: how many rows it holds."""

    call: Call
    slot: int
    rows: int
    dtype: torch.dtype
    digest: str


class BankMemory(Observer):
    """Gives `sink` a measure for each store of a step, tap "<store's tap>.kept": it fails when a later mix of the same
    rows has no source with the stored bytes. The order of the sources is free; one measure per (tap, phase), the first
    that fails or the first."""

    def __init__(self, sink: Callable[[Measure], None]) -> None:
        self.sink = sink
        self._stored: list[_Stored] = []
        self._found: dict[tuple[str, str], Measure] = {}

    def before(self, call: Call) -> None:
        if call.operator != MIX or not self._stored:
            return
        sources = call.args[0] if call.args else None
        if not isinstance(sources, torch.Tensor) or sources.dim() != 3:
            return
        alike = [stored for stored in self._stored if stored.rows == sources.shape[0]]
        for dtype in {stored.dtype for stored in alike}:  # a mix may read them in a wider type
            present = {_digest(source.to(dtype)) for source in sources.unbind(1)}
            for stored in alike:
                if stored.dtype == dtype:
                    self._keep(stored, call, stored.digest in present)

    def after(self, call: Call, token: Any, results: tuple[Any, ...]) -> None:
        if call.operator != STORE:
            return
        bank, value, slot = call.args[0], call.kwargs.get("value"), call.kwargs.get("slot")
        if isinstance(bank, torch.Tensor) and isinstance(value, torch.Tensor) and isinstance(slot, int):
            kept = bank[slot, : value.shape[0]]
            self._stored.append(_Stored(_without_tensors(call), slot, len(kept), kept.dtype, _digest(kept)))

    def end_step(self, step: int) -> None:
        self._stored.clear()

    def end_case(self) -> None:
        for measure in sorted(self._found.values(), key=lambda m: m.order):
            self.sink(measure)
        self._found.clear()

    def _keep(self, stored: _Stored, reader: Call, same: bool) -> None:
        call, at = stored.call, (stored.call.tap, stored.call.phase)
        known = self._found.get(at)
        if known is not None and (same or not known.passed):
            return
        message = f"slot {stored.slot} of the bank is no longer what was stored when {reader.tap} reads it"
        request = call.rows.requests[0] if len(call.rows.requests) == 1 else None
        self._found[at] = Measure(
            tap=f"{call.tap}.kept",
            operator=STORE,
            kind="move",
            phase=call.phase,
            layer=call.layer,
            order=call.order,
            rows=stored.rows,
            elements=stored.rows,
            passed=same,
            statistics={"overwritten": float(not same)},
            limits={"overwritten": 0.0},
            failing="" if same else "overwritten",
            request=None if same else request,
            pattern="" if same else PATTERN,
            message="" if same else message,
        )


def _digest(value: torch.Tensor) -> str:
    return hexadecimal(digest_lanes(value))


def _without_tensors(call: Call) -> Call:
    """The call without its arguments, which must not be kept alive for the length of a step."""
    return Call(call.place, call.operator, call.site, call.phase, call.step, call.order, call.rows, (), {})
