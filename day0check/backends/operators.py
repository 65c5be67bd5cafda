"""Runs every operator of a table on the hard inputs of its contract, through the recorder: no model is needed."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from day0check.contracts import CONTRACTS
from day0check.contracts.contract import Contract
from day0check.contracts.hard_inputs import HardInput, generate
from day0check.contracts.profiles import Profile
from day0check.probe.recorder import Caller, Recorder
from day0check.probe.registry import Operators, OwnedPool
from day0check.probe.rows import RowMap

PLACE = "operators"


@dataclass(frozen=True)
class OperatorsRun:
    """Number of calls, contract names that the table does not have, and (tap, error) of the calls that raised."""

    calls: int
    missing: tuple[str, ...]
    raised: tuple[tuple[str, str], ...]


def run_operators(
    table: Operators,
    recorder: Recorder,
    profile: Profile,
    names: Iterable[str] | None = None,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> OperatorsRun:
    """Calls each operator of `names` (all contracts with hard inputs by default) once per hard input, as prefill.

    Taps are "operators.<operator>.<input>", requests "operators/<operator>#<input>" with position = row. Observers see
    each call and the end of the case. An operator that raises does not stop the others; it is in `raised`.
    """
    contracts = [c for c in CONTRACTS.values() if c.hard_inputs and (names is None or c.name in set(names))]
    dtype = getattr(torch, profile.act_dtype)
    have, calls = set(table.names()), 0
    raised: list[tuple[str, str]] = []
    for contract in contracts:
        for name in contract.hard_inputs if contract.name in have else ():
            hard = generate(contract, name, seed, dtype, device=device)
            try:
                _call(table, recorder, contract, hard, calls)
            except Exception as error:  # a candidate's failure on one input is its result, the others still run
                traceback.print_exc()  # into the candidate's log; observers see that the call did not come back
                raised.append((f"{PLACE}.{contract.name}.{hard.site}", f"{type(error).__name__}: {error}"))
            calls += 1
    recorder.end_case()
    return OperatorsRun(calls, tuple(c.name for c in contracts if c.name not in have), tuple(raised))


def _call(table: Operators, recorder: Recorder, contract: Contract, hard: HardInput, step: int) -> None:
    rows = row_map(contract, hard)
    with recorder.step("prefill", rows, step):
        args, kwargs = _owned(table, contract, hard)
        Caller(table, recorder).at(PLACE)(contract.name, *args, site=hard.site, row_map=rows, **kwargs)


def _owned(table: Operators, contract: Contract, hard: HardInput) -> tuple[tuple[object, ...], dict[str, object]]:
    """The arguments of a hard input, its pool in the memory of the layout that owns it in this table, if one does."""
    layout = table.layouts.get(contract.name.split(".")[0])
    pool = hard.args[0]
    if layout is None or contract.args[0].role != "pool":
        return hard.args, hard.kwargs
    paged = contract.args[0].shape == "pages page width"
    pages, page, row = (*pool.shape[:2], pool.shape[2:]) if paged else (pool.shape[0], 1, pool.shape[1:])
    like = {"dtype": pool.dtype, "device": pool.device}
    owned = OwnedPool.allocate(layout, pages=pages, page=page, row=row, **like)
    owned.write(pool.reshape(pages * page, *row), torch.arange(pages * page, device=pool.device))
    return (owned, *hard.args[1:]), hard.kwargs


def row_map(contract: Contract, hard: HardInput) -> RowMap:
    """One request named after operator and input; position = row of the argument that has rows."""
    arguments = {contract.args[0].name: hard.args[0], **hard.kwargs}
    lengths = {
        role: len(arguments[a.name])
        for role in ("batch", "owner", "rows")
        for a in reversed(contract.args)
        if a.role == role and isinstance(arguments.get(a.name), torch.Tensor)
    }
    count = lengths.get("rows", lengths.get("owner", lengths.get("batch", 0)))
    return RowMap((f"operators/{contract.name}#{hard.name}",), (0,) * count, tuple(range(count)))
