"""Calls of one tap over several decode steps as one call: rows and requests follow each other, owners are shifted.

One judgement of 32 joined steps has 32 times the rows, so its statistics see more, and costs little more than one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from day0check.compare.replay import Replay
from day0check.contracts.contract import Contract
from day0check.probe.rows import RowMap

COPIED = ("rows", "batch", "owner", "offsets")
PER_EXPERT = {"moe.experts": ("w1", "w3", "w2", "w1_scale", "w3_scale", "w2_scale", "b1", "b3", "b2")}
MOST_BYTES = 4 * 2**20  # of one call; larger calls are judged at once
ROWS_OF_RESULT = ("rows", "pairs", "batch", "keys")


@dataclass(frozen=True)
class Seen:
    """One call after it happened: the arguments as they were before it, what it returned, and whose rows they are."""

    contract: Contract
    arguments: dict[str, Any]
    results: tuple[torch.Tensor, ...]
    rows: RowMap
    order: int
    step: int

    @property
    def byte_count(self) -> int:
        tensors = [*_tensors(self.contract, self.arguments).values(), *self.results]
        return sum(t.nbytes for t in tensors)


def copied(contract: Contract, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with everything that belongs to a step cloned: the call, or a later one, may overwrite it."""
    ours = _tensors(contract, arguments)
    return {name: value.detach().clone() if name in ours else value for name, value in arguments.items()}


def _tensors(contract: Contract, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    names = {a.name for a in contract.args if a.role in COPIED}
    if contract.name == "moe.combine":
        names.add("order")
    return {n: v for n, v in arguments.items() if n in names and isinstance(v, torch.Tensor)}


def identity(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What makes a shared tensor the same at two times: place, shape, writes so far; None where writes go uncounted."""
    try:
        version = tensor._version
    except RuntimeError:  # made under inference mode: writes are not counted
        return None
    return tensor.data_ptr(), version, tuple(tensor.shape), tensor.stride(), tensor.dtype


def signature(seen: Seen) -> tuple[Any, ...] | None:
    """Calls with equal signatures may be joined; None when this one must be judged alone."""
    contract = seen.contract
    if contract.name == "moe.convert" or contract.kind == "move" or contract.mutates:
        return None
    if any(r.rows not in ROWS_OF_RESULT for r in contract.results) or seen.byte_count > MOST_BYTES:
        return None
    if _has_padding(seen):
        return None
    ours = _tensors(contract, seen.arguments)
    per_expert = PER_EXPERT.get(contract.name, ())
    if sum(v.numel() * v.element_size() for n, v in seen.arguments.items() if n in per_expert and v is not None) > (
        MOST_BYTES
    ):
        return None
    parts: list[Any] = [contract.name]
    for name, value in sorted(seen.arguments.items()):
        if name in ours or name in per_expert:
            parts.append((name, None if value is None else (tuple(value.shape[1:]), value.dtype, value.device)))
        elif isinstance(value, torch.Tensor):
            same = identity(value)
            if same is None:
                return None
            parts.append((name, same))
        else:
            parts.append((name, repr(value)))
    return (*parts, *((tuple(r.shape[1:]), r.dtype) for r in seen.results))


def _has_padding(seen: Seen) -> bool:
    """Whether there are rows behind those of all requests: joined calls would take them for the next call's."""
    roles = {a.name: a.role for a in seen.contract.args}
    offsets = next((seen.arguments.get(name) for name, role in roles.items() if role == "offsets"), None)
    first = seen.arguments.get(seen.contract.args[0].name)
    if not isinstance(offsets, torch.Tensor) or not isinstance(first, torch.Tensor) or not len(offsets):
        return False
    return int(offsets[-1]) != first.shape[0]


def held(seen: Seen) -> Seen:
    """The same call with results, and weights that live in a shared workspace, copied so that it can wait."""
    per_expert = PER_EXPERT.get(seen.contract.name, ())
    arguments = {
        name: value.clone() if name in per_expert and value is not None else value
        for name, value in seen.arguments.items()
    }
    results = tuple(r.detach().clone() for r in seen.results)
    return Seen(seen.contract, arguments, results, seen.rows, seen.order, seen.step)


def joined(calls: list[Seen]) -> tuple[Replay, tuple[torch.Tensor, ...]]:
    """One replay of all calls, which have the same signature, and their results joined likewise."""
    first = calls[0]
    if len(calls) == 1:
        return Replay(first.contract, first.arguments), first.results
    contract = first.contract
    roles = {a.name: a.role for a in contract.args}
    ours = {*_tensors(contract, first.arguments), *PER_EXPERT.get(contract.name, ())}
    sizes = [_batch_size(c) for c in calls]
    arguments: dict[str, Any] = {}
    for name, value in first.arguments.items():
        if name not in ours or value is None:
            arguments[name] = value
            continue
        parts = [c.arguments[name] for c in calls]
        if name == "order":
            parts = _shifted(parts, [c.arguments["weights"].numel() for c in calls])
        elif roles[name] == "owner":
            parts = [torch.where(p >= 0, s, p) for p, s in zip(parts, _shifted(parts, sizes), strict=True)]
        elif roles[name] == "offsets":
            shifted = _shifted(parts, [int(p[-1]) for p in parts])
            parts = [shifted[0], *(p[1:] for p in shifted[1:])]
        arguments[name] = _cat(parts)
    return Replay(contract, arguments), tuple(
        _cat(list(parts)) for parts in zip(*(c.results for c in calls), strict=True)
    )


def _cat(parts: list[torch.Tensor]) -> torch.Tensor:
    if parts[0].dtype.is_floating_point and parts[0].element_size() == 1:
        return torch.cat([p.contiguous().view(torch.uint8) for p in parts]).view(parts[0].dtype)
    return torch.cat(parts)


def _shifted(parts: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    before, shifted = 0, []
    for part, size in zip(parts, sizes, strict=True):
        shifted.append(part + before)
        before += size
    return shifted


def _batch_size(seen: Seen) -> int:
    for a in seen.contract.args:
        value = seen.arguments.get(a.name)
        if a.role == "batch" and isinstance(value, torch.Tensor):
            return int(value.shape[0])
    return 0
