"""Replays the host side of answers while a server gives them: every call of an operator of the serve family again by
its reference, on the arguments that the server itself used."""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from day0check.contracts import CONTRACTS
from day0check.contracts.contract import Contract
from day0check.probe.registry import Operators, Registration
from day0check.types import Measure, to_json

FAMILY = "serve."
SHOWN = 60
CLOSE = 2e-6  # relative, of a log-probability: float64 sums in another order, rounded once to float32


@dataclass
class _Kept:
    """What the calls of one operator showed so far."""

    order: int = -1
    calls: int = 0
    wrong: int = 0
    message: str = ""


class ServingJudge:
    """Lays itself over the serve operators of a table; `write` gives one Measure for each, also for those not called.

    Calls come from the engine's thread and from the event loop: what is kept is changed under a lock.
    """

    def __init__(self) -> None:
        self._contracts = {name: c for name, c in sorted(CONTRACTS.items()) if name.startswith(FAMILY)}
        self._kept = {name: _Kept() for name in self._contracts}
        self._calls = 0
        self._lock = threading.Lock()

    def lay_over(self, operators: Operators) -> None:
        operators.apply(
            tuple(Registration("wrap", name, functools.partial(_called, self, name)) for name in self._contracts)
        )

    def judge(self, name: str, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The candidate's result, whatever the reference says of it; what the candidate raises goes on."""
        result = inner(*args, **kwargs)
        contract = self._contracts[name]
        wanted = contract.function()(*args, **kwargs)
        different = difference(contract, result, wanted)
        with self._lock:
            kept = self._kept[name]
            self._calls += 1
            kept.order = self._calls if kept.order < 0 else kept.order
            kept.calls += 1
            if different:
                kept.order = kept.order if kept.wrong else self._calls
                kept.wrong += 1
                kept.message = kept.message or f"{different} for {_shown(args, kwargs)}"
        return result

    def measures(self) -> tuple[Measure, ...]:
        with self._lock:
            return tuple(_measure(name, kept) for name, kept in self._kept.items())

    def write(self, file: Path) -> None:
        """One line of JSON for each operator of the family."""
        lines = [json.dumps(to_json(m), ensure_ascii=False, allow_nan=False) + "\n" for m in self.measures()]
        file.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")


def _called(judge: ServingJudge, name: str, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return judge.judge(name, inner, args, kwargs)


def _measure(name: str, kept: _Kept) -> Measure:
    return Measure(
        tap=name,
        operator=name,
        kind="exact",
        phase="serve",
        layer=None,
        order=kept.order,
        rows=kept.calls,
        elements=kept.calls,
        passed=kept.calls > 0 and not kept.wrong,
        statistics={"wrong_calls": float(kept.wrong)},
        limits={"wrong_calls": 0.0},
        failing="wrong_calls" if kept.wrong else "",
        pattern="another result" if kept.wrong else "",
        message=kept.message,
        not_judged="" if kept.calls else "it was not called",
    )


def difference(contract: Contract, got: Any, wanted: Any) -> str:
    """What of a result is other than the reference's, in words; "" when nothing is."""
    got, wanted = (v if isinstance(v, tuple) and len(contract.results) > 1 else (v,) for v in (got, wanted))
    if len(got) != len(wanted):
        return f"{len(got)} results came, not {len(wanted)}"
    for result, one, two in zip(contract.results, got, wanted, strict=True):
        if not _same(one, two):
            return f"{result.name} is {_brief(one)}, not {_brief(two)},"
    return ""


def _same(got: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor):
        return type(got) is type(wanted) and got == wanted
    if not isinstance(got, Tensor) or got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if not wanted.is_floating_point():
        return torch.equal(got, wanted)
    return torch.allclose(got.double(), wanted.double(), rtol=CLOSE, atol=CLOSE, equal_nan=True)


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        flat = value.reshape(-1)[:4].tolist()
        shown = ", ".join(f"{v:.6g}" if isinstance(v, float) and math.isfinite(v) else str(v) for v in flat)
        return f"[{shown}{', …' if value.numel() > 4 else ''}]"
    text = ascii(value)
    return text if len(text) <= SHOWN else f"…{text[-SHOWN:]}"


def _shown(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    named = {k: v for k, v in kwargs.items() if k in ("sent", "final", "strings", "token", "ends", "top")}
    return ", ".join([*(_brief(a) for a in args), *(f"{k}={_brief(v)}" for k, v in named.items())])
