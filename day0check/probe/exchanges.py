"""What a rank gave to others and got from them, and which pairs of row and expert it computed, by digests.

One JSON line for each call of `comm.all_gather` and `comm.all_to_all`:
    {tap, operator, phase, step, order, nth, layer, group, rank, size, requests,
     sent: {rank: [digest of each row]}, received: {rank: [...]}, where: [[request index, position] of each sent row]}
`nth` counts the calls of a tap within a step, so that the lines of all ranks can be laid side by side.
Of routed experts:
    moe.route    chosen: [[request index, position, expert, expert, ...] of each row]
    moe.experts  pairs: [[request index, position, expert] of each pair], results: [digest of each pair's result],
                 active: [expert, ...], converted: [number in the rank's stack of each, empty where none was converted]
    moe.combine  where: [[request index, position] of each row], pairs: [number of each pair], results: [digest]
Standard library + torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from .digest import row_digests
from .recorder import Call, Observer

GATHER, EXCHANGE = "comm.all_gather", "comm.all_to_all"
ROUTE, DISPATCH, EXPERTS, COMBINE = "moe.route", "moe.dispatch", "moe.experts", "moe.combine"
CONVERT = "moe.convert"


@dataclass
class _Dispatched:
    """Experts that have pairs at a place, and how far they were computed. `converted`: site of `moe.convert` -> the
    numbers in the stack that each of its calls decoded, in order: those of the next call may be decoded before this."""

    active: List[int]
    offsets: List[int]
    converted: Dict[str, List[List[int]]] = field(default_factory=dict)
    computed: int = 0
    calls: int = 0


class Exchanges(Observer):
    """Gives `sink` the lines of one rank. A call whose keywords are not those of the contract gives none."""

    def __init__(self, sink: Callable[[Dict[str, Any]], None]) -> None:
        self.sink = sink
        self._seen: Dict[str, int] = {}  # calls of each tap in this step
        self._dispatched: Dict[str, _Dispatched] = {}  # place -> what was dispatched there last

    def before(self, call: Call) -> Optional[Dict[str, List[int]]]:
        """Digests of what is about to be sent: a collective may work in place."""
        if call.operator not in (GATHER, EXCHANGE) or not call.args or "group" not in call.kwargs:
            return None
        x, group = call.args[0], call.kwargs["group"]
        if call.operator == GATHER:
            return {str(group.rank): row_digests(x).tolist()}
        return _by_rank(x, call.kwargs["send"])

    def after(self, call: Call, token: Optional[Dict[str, List[int]]], results: Tuple[Any, ...]) -> None:
        if token is not None and len(results) == 1 and isinstance(results[0], torch.Tensor):
            self.sink({**self._head(call), **_exchange(call, token, results[0])})
        elif call.operator == ROUTE and results:
            rows = zip(call.rows.owner, call.rows.position, results[0].tolist())
            self.sink({**self._head(call), "chosen": [[o, p, *experts] for o, p, experts in rows]})
        elif call.operator == COMBINE and call.args and "order" in call.kwargs:
            where = list(map(list, zip(call.rows.owner, call.rows.position)))
            pairs, digests = call.kwargs["order"].tolist(), row_digests(call.args[0]).tolist()
            self.sink({**self._head(call), "where": where, "pairs": pairs, "results": digests})
        elif call.operator == CONVERT and isinstance(call.kwargs.get("experts"), torch.Tensor):
            if call.place in self._dispatched:
                numbers = call.kwargs["experts"].tolist()
                self._dispatched[call.place].converted.setdefault(call.site, []).append(numbers)
        elif call.operator == DISPATCH and len(results) == 4:
            self._dispatched[call.place] = _Dispatched(results[2].tolist(), results[3].tolist())
        elif call.operator == EXPERTS and call.place in self._dispatched:
            self._experts(call, self._dispatched[call.place], results)

    def _experts(self, call: Call, dispatched: "_Dispatched", results: Tuple[Any, ...]) -> None:
        """The line of a call that computes the next ones of the dispatched experts, all of them or some."""
        offsets = call.kwargs.get("offsets")
        own = offsets.tolist() if isinstance(offsets, torch.Tensor) else dispatched.offsets
        active = dispatched.active[dispatched.computed : dispatched.computed + len(own) - 1]
        decoded = next(iter(dispatched.converted.values()), [])
        numbers = decoded[dispatched.calls] if dispatched.calls < len(decoded) else []
        dispatched.computed, dispatched.calls = dispatched.computed + len(active), dispatched.calls + 1
        line = {"pairs": _pairs(call, active, own), "results": row_digests(results[0]).tolist()}
        self.sink({**self._head(call), **line, "active": active, "converted": numbers})

    def end_step(self, step: int) -> None:
        self._seen, self._dispatched = {}, {}

    def _head(self, call: Call) -> Dict[str, Any]:
        nth = self._seen.get(call.tap, 0)
        self._seen[call.tap] = nth + 1
        return {
            "tap": call.tap,
            "operator": call.operator,
            "phase": call.phase,
            "step": call.step,
            "order": call.order,
            "nth": nth,
            "layer": call.layer,
            "requests": list(call.rows.requests),
        }


def _exchange(call: Call, sent: Dict[str, List[int]], result: torch.Tensor) -> Dict[str, Any]:
    group = call.kwargs["group"]
    if call.operator == GATHER:
        axis, received, start = call.kwargs["axis"], {}, 0
        for rank, size in enumerate(call.kwargs["sizes"]):
            received[str(rank)] = row_digests(result.narrow(axis, start, size)).tolist()
            start += size
    else:
        received = _by_rank(result, call.kwargs["receive"])
    where = list(map(list, zip(call.rows.owner, call.rows.position)))
    fits = len(where) == sum(len(rows) for rows in sent.values())
    return {
        "group": group.name,
        "rank": group.rank,
        "size": group.size,
        "sent": sent,
        "received": received,
        "where": where if fits else [],
    }


def _by_rank(x: torch.Tensor, counts: Sequence[int]) -> Dict[str, List[int]]:
    """Digests of the rows of each run of `x`."""
    digests, found, start = row_digests(x).tolist(), {}, 0
    for rank, count in enumerate(counts):
        found[str(rank)] = digests[start : start + count]
        start += count
    return found


def _pairs(call: Call, active: List[int], offsets: List[int]) -> List[List[int]]:
    expert = [number for a, number in enumerate(active) for _ in range(offsets[a], offsets[a + 1])]
    rows = zip(call.rows.owner, call.rows.position, expert)
    return [[owner, position, number] for owner, position, number in rows]
