"""The weights and settings with which a candidate calls its operators, recorded once for each tap and phase.

A setting is an argument that the contract calls static, a weight one that it calls shared. They are seen again at every
call and recorded again when they change. What belongs to a step or to a form of the kernel is in `NOT_COMPARED`.
"""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from day0check.compare.pooling import identity
from day0check.compare.weight_digest import part_digests, value_digest
from day0check.contracts import CONTRACTS
from day0check.contracts.contract import Contract
from day0check.probe.recorder import Call, Observer
from day0check.types import from_json, to_json

GRIDS = {"grids": "from the images"}
GATHERED = dict.fromkeys(
    ("w1", "w3", "w2", "w1_scale", "w3_scale", "w2_scale", "b1", "b3", "b2"), "the active experts of the step"
)
RANKS = "of the ranks"
# Arguments that are no property of the model, with the reason.
NOT_COMPARED: dict[str, dict[str, str]] = {
    "kv.slots": {"page": "free"},
    "kv.unpack": {"width": "of the record"},
    "kda.attention": {"chunk": "free"},
    "splice.positions": {"first": "of the step"},
    "splice.merge": {"features": "of the step", "at": "of the step"},
    "image.preprocess": {"image": "the input"},
    "image.preprocess_in_budget": {"image": "the input"},
    "vision.position": GRIDS,
    "vision.rope": GRIDS,
    "vision.rope_axial": GRIDS,
    "vision.merge": GRIDS,
    "moe.convert": {"experts": "of the step"},
    "moe.combine": {"order": "of the step"},
    "moe.experts": GATHERED,
    "comm.all_gather": dict.fromkeys(("group", "axis", "sizes"), RANKS),
    "comm.all_to_all": dict.fromkeys(("group", "send", "receive"), RANKS),
    "weights.read": {"name": "a place", "file": "a place"},
    "weights.place": {"tensor": "what was read", "transpose": "free"},
}
MOVES_FOLLOWED = 3  # a candidate that casts its weights anew for every call is digested so many times
BY_EXPERT = {"moe.convert": ("packed", "scale"), "moe.experts": ("w1", "w3", "w2")}
# Settings of each activation.
_USED_BY = {
    "silu": (),
    "situ": ("beta", "linear_beta"),
    "clamped": ("limit",),
    "clamped_plus_one": ("limit", "alpha"),
}


@dataclass(frozen=True)
class Weight:
    """What is known of a weight: `digest` of its values; `parts`, by expert number, where it is a stack of experts."""

    digest: str
    dtype: str
    shape: tuple[int, ...]
    parts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Recorded:
    """Settings and weights of a tap in a phase, from the call with execution index `order` on.

    `apart`: arguments that are not compared, with the reason.
    """

    tap: str
    operator: str
    phase: str
    layer: int | None
    order: int
    settings: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    apart: dict[str, str] = field(default_factory=dict)


def settings_of(contract: Contract, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The static arguments of a call as JSON values; what is None, or of no effect beside the others, is left out."""
    apart = NOT_COMPARED.get(contract.name, {})
    names = [a.name for a in contract.args if a.role == "static" and a.name not in apart]
    found = {name: _plain(arguments.get(name)) for name in names}
    return _effective(contract.name, {name: value for name, value in found.items() if value is not None})


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return to_json(value.item()) if value.numel() == 1 else to_json(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(v) for name, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return to_json(value)
    members = getattr(value, "__dict__", {}) if not callable(value) else {}
    shown = {name: to_json(v) for name, v in members.items() if isinstance(v, (bool, int, float, str))}
    return shown or f"an object of type {type(value).__name__}"


def _effective(operator: str, settings: dict[str, Any]) -> dict[str, Any]:
    if "activation" in settings:
        unused = {name for names in _USED_BY.values() for name in names} - set(_USED_BY.get(settings["activation"], ()))
        settings = {name: value for name, value in settings.items() if name not in unused}
        if settings["activation"] == "situ":
            settings.setdefault("beta", 1.0)
    if operator == "moe.route" and settings.get("kept_groups", 1) >= settings.get("groups", 1):
        settings = settings | {"groups": 1, "kept_groups": 1}
    return settings


def weight_names(contract: Contract, arguments: Mapping[str, Any]) -> list[str]:
    """The shared arguments of a call that are weights of the model, are there and have values of their own."""
    apart = NOT_COMPARED.get(contract.name, {})
    names = [a.name for a in contract.args if a.role == "shared" and a.name not in apart]
    return [n for n in names if isinstance(arguments.get(n), torch.Tensor) and not _needs_scale(arguments[n])]


def _needs_scale(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.element_size() == 1


def apart_of(contract: Contract, arguments: Mapping[str, Any]) -> dict[str, str]:
    """The arguments of a call that are not compared, with the reason."""
    given = {a.name: arguments[a.name] for a in contract.args if arguments.get(a.name) is not None}
    apart = {n: why for n, why in NOT_COMPARED.get(contract.name, {}).items() if n in given}
    payloads = [a.name for a in contract.args if a.role == "shared" and isinstance(given.get(a.name), torch.Tensor)]
    return {n: "an 8-bit payload without its scale" for n in payloads if _needs_scale(given[n])} | apart


def weight_of(operator: str, name: str, tensor: torch.Tensor) -> Weight:
    """The record of one weight."""
    parts = part_digests(tensor) if name in BY_EXPERT.get(operator, ()) else ()
    numbered = {str(number): part for number, part in enumerate(parts)}
    digest = "" if numbered else value_digest(tensor)
    return Weight(digest, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), numbered)


def named_arguments(contract: Contract, call_args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name, the positional one too."""
    return dict(kwargs) | ({contract.args[0].name: call_args[0]} if call_args else {})


def read_recorded(path: Path) -> tuple[Recorded, ...]:
    """The records of a file of JSON lines. Raises ValueError for a line that is none."""
    return tuple(from_json(Recorded, json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())


class KnownWeights:
    """Records of tensors that were digested before and have not been written since; it keeps no tensor alive."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], tuple[weakref.ref, Any, Weight]] = {}

    def of(self, operator: str, name: str, tensor: torch.Tensor) -> Weight:
        mark, key = identity(tensor), (id(tensor), operator, name)
        known = self._known.get(key)
        if mark is not None and known is not None and known[0]() is tensor and known[1] == mark:
            return known[2]
        weight = weight_of(operator, name, tensor)
        self._known[key] = (weakref.ref(tensor), mark, weight)
        return weight


@dataclass
class _State:
    """What was recorded last of a tap in a phase."""

    settings: dict[str, Any]
    marks: dict[str, Any]
    weights: dict[str, Weight]
    moved: int = 0  # how often the weights lay elsewhere and were the same


class ParametersRecorder(Observer):
    """Gives `sink` a Recorded for each tap and phase, at its first call and whenever a setting or a weight changes.

    Plain expert weights come as those that a step uses: they are recorded by expert number, at the end of the case,
    with the numbers that `moe.dispatch` of the same place gave. `known` may be shared by the cases of a process.
    """

    def __init__(self, sink: Callable[[Recorded], None], known: KnownWeights | None = None) -> None:
        self.sink, self.known = sink, KnownWeights() if known is None else known
        self._last: dict[tuple[str, str], _State] = {}
        self._active: dict[str, list[int]] = {}
        self._experts: dict[str, Recorded] = {}

    def before(self, call: Call) -> None:
        contract = CONTRACTS.get(call.operator)
        if contract is None:
            return
        arguments = named_arguments(contract, call.args, call.kwargs)
        settings, names = settings_of(contract, arguments), weight_names(contract, arguments)
        if call.operator == "moe.experts":
            self._see_experts(call, arguments, settings)
        if not settings and not names:
            return
        marks = {name: identity(arguments[name]) for name in names}
        last = self._last.get((call.tap, call.phase))
        if last is not None and last.settings == settings and (last.marks == marks or last.moved >= MOVES_FOLLOWED):
            return
        weights = {name: self.known.of(call.operator, name, arguments[name]) for name in names}
        same = last is not None and (last.settings, last.weights) == (settings, weights)
        self._last[call.tap, call.phase] = _State(settings, marks, weights, last.moved + 1 if same else 0)
        if not same:
            apart = apart_of(contract, arguments)
            self.sink(Recorded(call.tap, call.operator, call.phase, call.layer, call.order, settings, weights, apart))

    def after(self, call: Call, token: Any, results: tuple[Any, ...]) -> None:
        if call.operator == "moe.dispatch" and len(results) == 4 and isinstance(results[2], torch.Tensor):
            self._active[call.place] = results[2].tolist()

    def end_case(self) -> None:
        for recorded in self._experts.values():
            self.sink(recorded)
        self._last, self._active, self._experts = {}, {}, {}

    def _see_experts(self, call: Call, arguments: Mapping[str, Any], settings: dict[str, Any]) -> None:
        """Adds the experts that this call is the first to use, where their weights are values of their own."""
        active = self._active.get(call.place)
        stacks = {name: arguments.get(name) for name in BY_EXPERT["moe.experts"]}
        if active is None or arguments.get("w1_scale") is not None:
            return
        if not all(
            isinstance(s, torch.Tensor) and s.element_size() > 1 and len(s) == len(active) for s in stacks.values()
        ):
            return
        if call.tap not in self._experts:
            weights = {n: Weight("", str(s.dtype).removeprefix("torch."), tuple(s.shape)) for n, s in stacks.items()}
            where = (call.tap, call.operator, call.phase, call.layer, call.order)
            self._experts[call.tap] = Recorded(*where, settings, weights)
        weights = self._experts[call.tap].weights
        new = [row for row, expert in enumerate(active) if str(expert) not in weights["w1"].parts]
        for name, stack in stacks.items() if new else ():
            digests = part_digests(stack[torch.tensor(new, device=stack.device)].float())
            weights[name].parts.update({str(active[row]): digest for row, digest in zip(new, digests, strict=True)})
