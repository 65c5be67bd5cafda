"""Keeps one call whole: its arguments as they were before it, its results, and what it wrote in place.

Files in the directory: `call.json` {tap, operator, site, phase, step, order, requests, owner, position, arguments,
results, written} and `tensors.safetensors`. An argument is {"tensor": key}, {"value": JSON}, {"record": [kind, fields]}
for a dataclass, or {"unreadable": type}. Keys: "argument.NAME", "result.0", "written.NAME"; the positional one is "0".
Standard library + torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Collection, Dict, Optional, Tuple, Union

import torch

from .recorder import Call, Observer
from .records import replace_bytes
from .safetensors_writer import write

CALL, TENSORS = "call.json", "tensors.safetensors"


class Witness(Observer):
    """Writes the first call of `tap` in `phase` that has a row of (`request`, `position`), where they are given.

    `written`: names of the arguments that the operator writes in place. Nothing is written when no call fits.
    """

    def __init__(
        self,
        directory: Union[str, Path],
        *,
        tap: str,
        phase: str,
        request: Optional[str] = None,
        position: Optional[int] = None,
        written: Collection[str] = (),
    ) -> None:
        self.directory, self.tap, self.phase = Path(directory), tap, phase
        self.request, self.position, self.written = request, position, frozenset(written)
        self.done = False

    def _fits(self, call: Call) -> bool:
        if self.done or call.tap != self.tap or call.phase != self.phase:
            return False
        if self.request is None or self.request not in call.rows.requests:
            return self.request is None
        owner = call.rows.requests.index(self.request)
        places = [p for o, p in zip(call.rows.owner, call.rows.position) if o == owner]
        return self.position is None or self.position in places

    def before(self, call: Call) -> Optional[Dict[str, Any]]:
        if not self._fits(call):
            return None
        named = [(str(i), value) for i, value in enumerate(call.args)] + list(call.kwargs.items())
        return {name: _copy(value) for name, value in named}

    def after(self, call: Call, token: Optional[Dict[str, Any]], results: Tuple[Any, ...]) -> None:
        if token is None:
            return
        self.done = True
        now = {**{str(i): value for i, value in enumerate(call.args)}, **call.kwargs}
        tensors = {f"argument.{name}": value for name, value in token.items() if isinstance(value, torch.Tensor)}
        tensors.update({f"result.{i}": _copy(r) for i, r in enumerate(results) if isinstance(r, torch.Tensor)})
        changed = [name for name in now if name in self.written and isinstance(now[name], torch.Tensor)]
        tensors.update({f"written.{name}": _copy(now[name]) for name in changed})
        line = {
            "tap": call.tap,
            "operator": call.operator,
            "site": call.site,
            "phase": call.phase,
            "step": call.step,
            "order": call.order,
            "requests": list(call.rows.requests),
            "owner": list(call.rows.owner),
            "position": list(call.rows.position),
            "arguments": {name: _told(name, value) for name, value in token.items()},
            "results": [f"result.{i}" if isinstance(r, torch.Tensor) else None for i, r in enumerate(results)],
            "written": changed,
        }
        self.directory.mkdir(parents=True, exist_ok=True)
        write(self.directory / TENSORS, tensors)
        replace_bytes(self.directory / CALL, json.dumps(line).encode())


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _told(name: str, value: Any) -> Dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {"tensor": f"argument.{name}"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        if all(_plain(v) for v in fields.values()):
            return {"record": [type(value).__name__, fields]}
    return {"value": value} if _plain(value) else {"unreadable": type(value).__name__}


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_plain(v) for v in value)
    return value is None or isinstance(value, (bool, int, float, str))
