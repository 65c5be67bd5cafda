"""Which values are whole and which are one rank's part of a sum: a part must be reduced, once, before it is used.

A backend says of its operators' results how they are cut: `recorder.dims(place, operator, site)` gives a dims string
such as "rows, heads@tp, dim" (an axis cut over the group "tp") or "rows, hidden, partial@tp" (parts of a sum), and of
several results those strings joined by ";". Values are followed by their memory, through views, to the calls that
read them. Standard library + torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .recorder import Call, Observer

MOVES, REDUCES = ("comm.all_gather", "comm.all_to_all"), ("comm.all_reduce", "comm.reduce_scatter")
LINEAR = ("moe.combine",)  # of parts they give parts
MARK = "partial@"
MISSING, TWICE = "used before it is reduced", "reduced although it is whole"


class Flow(Observer):
    """Gives `sink` a record with the fields of a Measure for each tap and phase whose value is used as what it is not,
    and one that passes for each tap whose parts were reduced."""

    def __init__(self, sink: Callable[[Dict[str, Any]], None]) -> None:
        self.sink = sink
        self._values: Dict[int, Tuple[StorageWeakRef, str, Call]] = {}  # storage -> its claim and who made it
        self._found: Dict[Tuple[str, str], Dict[str, Any]] = {}
        self._sum = REDUCES[0]  # the operator by which parts were summed last

    def before(self, call: Call) -> List[Tuple[str, Call]]:
        """The claims of the arguments that are known."""
        known = []
        for value in (*call.args, *call.kwargs.values()):
            found = self._claim(value)
            if found is not None:
                known.append(found)
        return known

    def after(self, call: Call, token: List[Tuple[str, Call]], results: Tuple[Any, ...]) -> None:
        parts = [made for claim, made in token if MARK in claim]
        if call.operator in REDUCES:
            self._sum = call.operator
            whole = [made for claim, made in token if MARK not in claim]
            for made in parts:
                self._keep(made, call, "")
            for _ in whole:
                self._keep(call, call, TWICE)
        elif call.operator not in MOVES and call.operator not in LINEAR:
            for made in parts:
                self._keep(made, call, MISSING)
        self._remember(call, token, results)

    def end_step(self, step: int) -> None:
        self._values = {}

    def end_case(self) -> None:
        self.end_step(0)
        for record in sorted(self._found.values(), key=lambda r: r["order"]):
            self.sink(record)
        self._found = {}

    def _claim(self, value: Any) -> Optional[Tuple[str, Call]]:
        if type(value) is not torch.Tensor or not value.numel():
            return None
        found = self._values.get(value.untyped_storage()._cdata)
        return None if found is None else found[1:]

    def _remember(self, call: Call, token: List[Tuple[str, Call]], results: Tuple[Any, ...]) -> None:
        if call.operator in MOVES:  # parts that were gathered or sent are parts still, wholes are wholes
            if not token:
                return
            claims, made = [token[0][0]], token[0][1]
        elif call.operator in LINEAR and any(MARK in claim for claim, _ in token):
            claims, made = [next(claim for claim, _ in token if MARK in claim)], call
        else:
            claims, made = [call.dims_of(index) for index in range(len(results))], call
        for index, value in enumerate(results):
            if type(value) is torch.Tensor and value.numel():
                claim = claims[index] if index < len(claims) else ""
                storage = value.untyped_storage()
                self._values[storage._cdata] = (StorageWeakRef(storage), claim, _without_tensors(made))

    def _keep(self, made: Call, reader: Call, pattern: str) -> None:
        """One record for each tap and phase of the value's maker: the first that is wrong, or the first."""
        at = (made.tap, made.phase)
        known = self._found.get(at)
        if known is None or (known["passed"] and pattern):
            self._found[at] = record(made, reader, pattern, operator=self._sum)


def _without_tensors(call: Call) -> Call:
    return Call(call.place, call.operator, call.site, call.phase, call.step, call.order, call.rows, (), {}, call.dims)


def record(made: Call, reader: Call, pattern: str, *, operator: str = REDUCES[0]) -> Dict[str, Any]:
    """The record of one value, as the JSON form of a Measure. What is missing or too much is a reduction: `operator`,
    by which this run sums."""
    if pattern == MISSING:
        text = f"{made.tap} is one rank's part of a sum, and {reader.tap} reads it before the parts are summed"
    elif pattern == TWICE:
        text = f"{made.tap} sums what is whole on every rank: it counts once for each of them"
    else:
        text = ""
    request, position = (made.rows.address(0) if len(made.rows) else (None, None)) if pattern else (None, None)
    return {
        "tap": f"{made.tap}.reduced",
        "operator": operator,
        "kind": "move",
        "phase": made.phase,
        "layer": made.layer,
        "order": made.order,
        "rows": len(made.rows),
        "elements": len(made.rows),
        "passed": not pattern,
        "statistics": {"wrong_reductions": float(bool(pattern))},
        "limits": {"wrong_reductions": 0.0},
        "failing": "wrong_reductions" if pattern else "",
        "request": request,
        "position": position,
        "pattern": pattern,
        "message": text,
    }
