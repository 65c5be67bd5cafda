"""Observers that keep what calls produced: bytes (`Capture`) or numbers only (`Digests`).

Files of a capture, in one directory: `step-000000.safetensors` per step and `manifest.jsonl`, a line per result:
{tap, operator, site, phase, step, order, result, owner, position, requests, file, key, dtype, shape}. Where the first
axis of a result is not that of the call's rows, `owner` and `position` are empty. A line of an argument (mode "full")
has `arg`, its name, and result -1, -2, ...; a line with `dropped` names what the cap left out: file and key are "".
Standard library + torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Collection, Dict, List, Optional, Tuple, Union

import torch

from .digest import digest_lanes, hexadecimal
from .recorder import Call, Observer
from .records import Lines
from .safetensors_writer import write

MANIFEST = "manifest.jsonl"


def row_arguments(call: Call) -> Tuple[Tuple[str, torch.Tensor], ...]:
    """(name, tensor) of the arguments whose first axis is the call's rows; positional ones are named "0", "1", ..."""
    named = [(str(i), value) for i, value in enumerate(call.args)] + list(call.kwargs.items())
    return tuple(
        (name, value)
        for name, value in named
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == len(call.rows)
    )


def _line(call: Call, result: int, value: torch.Tensor) -> Dict[str, Any]:
    fits = value.dim() > 0 and value.shape[0] == len(call.rows)
    dims = {"dims": call.dims_of(result)} if call.dims_of(result) else {}
    return {
        "tap": call.tap,
        "operator": call.operator,
        "site": call.site,
        "phase": call.phase,
        "step": call.step,
        "order": call.order,
        "result": result,
        "owner": list(call.rows.owner) if fits else [],
        "position": list(call.rows.position) if fits else [],
        "requests": list(call.rows.requests),
        "dtype": str(value.dtype).replace("torch.", ""),
        "shape": list(value.shape),
        **dims,
    }


class Capture(Observer):
    """Writes the results of the chosen operators to `directory`, a file per step, each written when its step ends.

    `operators`: names to keep (None: all). `byte_cap`: bytes of tensors kept over the case; what is beyond it is named
    in the manifest and dropped. `mode` "judge": results; "full": also the arguments whose first axis is the rows.
    """

    def __init__(
        self,
        directory: Union[str, Path],
        operators: Optional[Collection[str]] = None,
        *,
        byte_cap: int = 1 << 30,
        mode: str = "judge",
    ) -> None:
        if mode not in ("judge", "full"):
            raise ValueError(f"mode of a capture is 'judge' or 'full', not {mode!r}")
        self.directory, self.byte_cap, self.mode = Path(directory), byte_cap, mode
        self.operators = None if operators is None else frozenset(operators)
        self.bytes_kept, self.bytes_dropped = 0, 0
        self._manifest = Lines(self.directory / MANIFEST)
        self._files: Dict[int, int] = {}  # files written so far of each step number
        self._tensors: Dict[str, torch.Tensor] = {}
        self._lines: List[Dict[str, Any]] = []
        self._step = 0

    def _keeps(self, call: Call) -> bool:
        return self.operators is None or call.operator in self.operators

    def before(self, call: Call) -> None:
        if self.mode == "full" and self._keeps(call):
            for index, (name, value) in enumerate(row_arguments(call)):
                self._keep(call, -1 - index, value, arg=name)

    def after(self, call: Call, token: Any, results: Tuple[Any, ...]) -> None:
        if self._keeps(call):
            for index, value in enumerate(results):
                if isinstance(value, torch.Tensor):
                    self._keep(call, index, value)

    def shown(self, call: Call, results: Tuple[Any, ...]) -> None:
        self.after(call, None, results)

    def _keep(self, call: Call, result: int, value: torch.Tensor, arg: str = "") -> None:
        line = _line(call, result, value)
        if arg:
            line["arg"] = arg
        size = value.numel() * value.element_size()
        if self.bytes_kept + size > self.byte_cap:
            self.bytes_dropped += size
            line.update(file="", key="", dropped=f"{size} bytes beyond the cap of {self.byte_cap} bytes")
        else:
            self.bytes_kept += size
            line.update(file=None, key=f"{call.order}.{result}")
            # a copy: the buffer may be written again before the step ends
            self._tensors[line["key"]] = value.detach().to("cpu", copy=True)
        self._lines.append(line)
        self._step = call.step

    def _flush(self, step: int) -> None:
        if not self._lines:
            return
        again = self._files.get(step, 0)
        self._files[step] = again + 1
        name = f"step-{step:06d}.safetensors" if not again else f"step-{step:06d}-{again}.safetensors"
        if self._tensors:
            write(self.directory / name, self._tensors)
        self._manifest.write(*({**line, "file": name if line["file"] is None else ""} for line in self._lines))
        self._tensors, self._lines = {}, []

    def end_step(self, step: int) -> None:
        self._flush(step)

    def end_case(self) -> None:
        self._flush(self._step)
        self._manifest.close()


HELD = 1 << 20  # digests that may lie on a device, 16 bytes each, before they are fetched


class Digests(Observer):
    """Gives `sink` a manifest line with `digest` for every tensor result, in the order of the calls.

    The sums are enqueued in the stream of the results. On the host they are told at the end of each step; on a device
    they stay there until the end of the case and come in one copy (one each HELD digests), so that the host runs ahead
    of the device as far as it does unobserved. What a process that dies has not fetched is lost.
    """

    def __init__(self, sink: Callable[[Dict[str, Any]], None], operators: Optional[Collection[str]] = None) -> None:
        self.sink = sink
        self.operators = None if operators is None else frozenset(operators)
        self._pending: List[Tuple[Dict[str, Any], torch.Tensor]] = []

    def after(self, call: Call, token: Any, results: Tuple[Any, ...]) -> None:
        if self.operators is None or call.operator in self.operators:
            for index, value in enumerate(results):
                if isinstance(value, torch.Tensor):
                    self._pending.append((_line(call, index, value), digest_lanes(value)))

    def end_step(self, step: int) -> None:
        if len(self._pending) >= HELD or all(_on_host(sums) for _, sums in self._pending):
            self._tell()

    def end_case(self) -> None:
        self._tell()

    def _tell(self) -> None:
        pending, self._pending = self._pending, []
        for (line, _), sums in zip(pending, fetched([sums for _, sums in pending])):
            self.sink({**line, "digest": hexadecimal(sums)})


def fetched(tensors: List[torch.Tensor]) -> List[torch.Tensor]:
    """Tensors of one shape on the host: one copy, and one wait, for all of a device."""
    places: Dict[torch.device, List[int]] = {}
    for number, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(number)
    found = list(tensors)
    for numbers in places.values():
        together = torch.stack([tensors[number] for number in numbers])
        for number, tensor in zip(numbers, together if _on_host(together) else together.cpu()):
            found[number] = tensor
    return found


def _on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"
