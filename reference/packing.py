"""Projections of a linear-attention layer that a checkpoint stores in one matrix, each part by its rows.

`in_proj.weight`: [Q | K | V | Z | beta | alpha], one component after the other (hybrid Mamba and gated DeltaNet models
of Megatron). `in_proj_ba.weight`: [b0 a0 b1 a1 ...], the two gates of each head side by side (Qwen3-Next).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch

from reference.config import ModelConfig

PACKED_FORMS = {"packed-linear": "in_proj", "interleaved-gates": "in_proj_ba"}  # form of a preset -> matrix
_PACKED = re.compile(r"(layers\.(\d+)\.self_attn\.)(in_proj|in_proj_ba)\.weight")


def packed_parts(name: str, config: ModelConfig) -> dict[str, range]:
    """Canonical name of each part of the packed matrix of canonical `name` -> its rows there; {} for any other name.

    Only models whose decay and output gate are projected from the hidden state directly have such a matrix.
    """
    found, k = _PACKED.fullmatch(name), config.kda
    if found is None or k is None or k.decay != "per_head" or not k.full_rank_gate:
        return {}
    place, layer, matrix = found.groups()
    if config.layers[int(layer) : int(layer) + 1] != ("kda",):
        return {}
    if matrix == "in_proj_ba":
        rows = {"b": range(0, 2 * k.heads, 2), "a": range(1, 2 * k.heads, 2)}
    else:
        rows, begin = {}, 0
        for part in ("q", "k", "v", "g", "b", "a"):
            count = k.heads if part in "ba" else k.heads * k.dim
            rows[part] = range(begin, begin + count)
            begin += count
    return {f"{place}{part}_proj.weight": own for part, own in rows.items()}


def part_shapes(parts: Mapping[str, range], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shape that each of the parts has in a packed matrix of `shape`. Rows that nobody asks for are the last part's
    and missing ones are missing from where they lie, so that a matrix of another size shows in the shape of a part."""
    found = {name: (sum(row < shape[0] for row in rows), *shape[1:]) for name, rows in parts.items()}
    last = list(parts)[-1]
    extra = shape[0] - 1 - max(rows[-1] for rows in parts.values())
    return found | {last: (found[last][0] + max(0, extra), *shape[1:])}


def packed(
    tensors: Iterable[tuple[str, torch.Tensor]], *, forms: Iterable[str], config: ModelConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same (canonical name, tensor) pairs with those that the storage `forms` pack joined into one matrix each."""
    matrices = [PACKED_FORMS[form] for form in forms if form in PACKED_FORMS]
    names = [f"layers.{layer}.self_attn.{m}.weight" for layer in range(len(config.layers)) for m in matrices]
    owner = {part: name for name in names for part in packed_parts(name, config)}
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors:
        if name not in owner:
            yield name, tensor
            continue
        parts = packed_parts(owner[name], config)
        mine = held.setdefault(owner[name], {})
        mine[name] = tensor
        if len(mine) == len(parts):
            joined = tensor.new_empty(sum(map(len, parts.values())), *tensor.shape[1:])
            for part, rows in parts.items():
                joined[list(rows)] = mine[part]
            yield owner[name], joined


def unpacked(matrix: torch.Tensor, rows: range) -> torch.Tensor:
    """The rows of one part of a packed matrix, in memory of their own."""
    return matrix[rows.start : rows.stop : rows.step].clone()
