"""What a model directory really holds, file by file, without believing that it is whole.

`Checkpoint` refuses the first thing that is wrong; an inventory lists everything, so that it can be judged. Reads the
headers of all safetensors files and, only when asked, the scales of quantised weights.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from reference.coded import PACKED, SHAPE
from reference.config import ModelConfig
from reference.errors import CheckpointError
from reference.families import read_config_and_rest
from reference.families.parts import is_block_fp8, is_int4
from reference.formats import E8M0_NAN, INT4_CODES
from reference.names import canonical_name
from reference.tensors import with_stored_draft
from reference.weights import INDEX, SINGLE, read_header, read_json

BLOCK_ELEMENTS = 1 << 22  # of a tensor of scales that are in memory at once

Header = dict[str, tuple[str, tuple[int, ...]]]  # stored name -> dtype as safetensors spells it, shape


@dataclass(frozen=True)
class Inventory:
    """`index`: stored name -> file as the index says, or as the single file holds. `headers`: every safetensors file
    of the directory that can be read, the unlisted ones too. `missing`: files that the index names and that are not
    there. `damaged`: file -> why its header cannot be believed. `stated_bytes`: the index's `metadata.total_size`."""

    directory: Path
    config: ModelConfig
    config_json: dict[str, Any]
    unknown_keys: tuple[str, ...]
    index: dict[str, str]
    headers: dict[str, Header]
    missing: tuple[str, ...] = ()
    damaged: dict[str, str] = field(default_factory=dict)
    stated_bytes: int | None = None

    @property
    def listed(self) -> frozenset[str]:
        """Files that the index names."""
        return frozenset(self.index.values())

    @cached_property
    def canonical(self) -> dict[str, str]:
        """Stored name -> canonical name of every tensor of the index, sorted."""
        return {stored: canonical_name(stored) for stored in sorted(self.index)}

    @cached_property
    def sound(self) -> dict[str, tuple[str, str, tuple[int, ...]]]:
        """Stored name -> (file, dtype, shape) of every tensor that lies where the index puts it."""
        return {
            stored: (file, *self.headers[file][stored])
            for stored, file in self.index.items()
            if stored in self.headers.get(file, {})
        }

    @property
    def lost(self) -> frozenset[str]:
        """Canonical names that the index lists and that do not lie where it puts them."""
        return frozenset(name for stored, name in self.canonical.items() if stored not in self.sound)


def take_inventory(model_dir: str | Path) -> Inventory:
    """The inventory of a model directory.

    Raises CheckpointError when there is nothing to take one of: no directory, an unreadable config.json, a model_type
    or a quantisation without a reader, neither an index nor a single file of weights.
    """
    directory = Path(model_dir)
    if not directory.is_dir():
        raise CheckpointError("there is no such directory", where=str(directory), todo="give a model directory")
    config_json = read_json(directory / "config.json")
    side = {part: read_json(directory / f"{part}_config.json", optional=True) for part in ("preprocessor", "tokenizer")}
    config, unknown = read_config_and_rest(config_json, **side)
    headers, damaged = {}, {}
    for file in sorted(directory.glob("*.safetensors")):
        try:
            headers[file.name] = read_header(file)
        except CheckpointError as error:
            damaged[file.name] = error.what
    index = _index(directory, headers, damaged)
    missing = sorted(file for file in set(index.values()) if file not in headers and file not in damaged)
    config = with_stored_draft(config, map(canonical_name, index))
    stated = _stated_bytes(directory)
    return Inventory(directory, config, config_json, unknown, index, headers, tuple(missing), damaged, stated)


def _stated_bytes(directory: Path) -> int | None:
    metadata = read_json(directory / INDEX, optional=True).get("metadata")
    found = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def _index(directory: Path, headers: dict[str, Header], damaged: dict[str, str]) -> dict[str, str]:
    file = directory / INDEX
    if file.is_file():
        weight_map = read_json(file).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError("key 'weight_map' must map tensor names to files", where=str(file))
        return weight_map
    if SINGLE in headers:
        return dict.fromkeys(headers[SINGLE], SINGLE)
    if SINGLE in damaged:
        raise CheckpointError(damaged[SINGLE], where=str(directory / SINGLE), todo="fetch it again")
    raise CheckpointError(
        f"there is neither {INDEX} nor {SINGLE}", where=str(directory), todo="give a directory with weights"
    )


def declared_quantisation(config_json: dict[str, Any]) -> str:
    """ "mxfp4", "block-fp8", "int4" or "" : what config.json, or its text_config, says of the weights."""
    for part in (config_json, config_json.get("text_config") or {}):
        found = part.get("quantization_config")
        if isinstance(found, dict):
            return "block-fp8" if is_block_fp8(found) else "int4" if is_int4(found) else "mxfp4"
    return ""


def declared_draft_layers(config_json: dict[str, Any]) -> int:
    """How many layers that draft tokens config.json, or its text_config, declares."""
    parts = (config_json, config_json.get("text_config") or {})
    return max((n for part in parts if isinstance(n := part.get("num_nextn_predict_layers"), int)), default=0)


def broken_scales(inventory: Inventory, stored: set[str]) -> Iterator[tuple[str, str, str]]:
    """(stored name, file, what) of every tensor of scales among `stored` with a value that is no scale: E8M0 byte 255
    (NaN), or a float that is not finite and above zero. Reads those tensors in blocks, one at a time."""
    for name, file, scales in _slices(inventory, stored):
        what = _broken_in(scales)
        if what:
            yield name, file, what


def wrong_shapes(inventory: Inventory) -> Iterator[tuple[str, str, str]]:
    """(stored name, file, what) of every tensor that states another shape than the INT4 words beside it hold."""
    words = {name: shape for name, (_, dtype, shape) in inventory.sound.items() if dtype == "I32" and len(shape) == 2}
    due = {
        f"{name.removesuffix(PACKED)}{SHAPE}": [shape[0], shape[1] * INT4_CODES]
        for name, shape in words.items()
        if name.endswith(f".weight{PACKED}")
    }
    for name, file, stated in _slices(inventory, due.keys()):
        if stated[:].tolist() != due[name]:
            yield name, file, f"{stated[:].tolist()}, and the words beside it hold {due[name]} codes"


def _slices(inventory: Inventory, stored: Collection[str]) -> Iterator[tuple[str, str, Any]]:
    """(stored name, file, slice) of the tensors of these names that lie where the index puts them, file by file."""
    by_file: dict[str, list[str]] = {}
    for name, (file, _, _) in inventory.sound.items():
        if name in stored:
            by_file.setdefault(file, []).append(name)
    for file, names in sorted(by_file.items()):
        try:
            with safe_open(str(inventory.directory / file), framework="pt", device="cpu") as opened:
                for name in sorted(names):
                    yield name, file, opened.get_slice(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot be read: {error}", where=str(inventory.directory / file)) from error


def _broken_in(scales: Any) -> str:
    """What is wrong with a slice of scales, read in blocks of rows of at most `BLOCK_ELEMENTS`; "" when nothing is."""
    shape = scales.get_shape()
    rows = max(1, BLOCK_ELEMENTS // max(1, math.prod(shape[1:])))
    count, first = 0, ""
    for begin in range(0, shape[0], rows) if shape else (None,):
        block = scales[:] if begin is None else scales[begin : begin + rows]
        bad = block == E8M0_NAN if block.dtype == torch.uint8 else ~(torch.isfinite(block) & (block > 0))
        count += int(bad.sum())
        if not first and bool(bad.any()):
            place = torch.nonzero(bad)[0].tolist()
            value = float(block[tuple(place)])
            what = "E8M0 byte 255, which is NaN" if block.dtype == torch.uint8 else f"scale {value}"
            first = f"{what}, at {[place[0] + (begin or 0), *place[1:]] if place else []}"
    return f"{first}, {count} of {math.prod(shape)} in all" if first else ""
