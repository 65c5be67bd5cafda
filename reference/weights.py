"""The only reader and writer of checkpoints: a directory of config.json and safetensors files.

Files are opened lazily and tensors are read one at a time, so that a checkpoint may be larger than memory.
safetensors: eight bytes of little-endian header length, a JSON header of (dtype, shape, data_offsets), the data.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from reference.coded import BLOCK_FP8, GROUP_SCALES, INT4, SCALES, SHAPE, beside, scales_due, with_int4
from reference.config import ModelConfig
from reference.errors import CheckpointError
from reference.families import read_config, read_config_and_rest
from reference.formats import block_fp8_decode, int4_decode
from reference.names import canonical_name, stored_name, stored_shape
from reference.packing import packed_parts, part_shapes, unpacked
from reference.tensors import DRAFT_COPIES, Stored, expected_tensors, with_stored_draft

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "place_tensor",
    "read_config",
    "read_header",
    "read_json",
    "read_tensor",
    "write_checkpoint",
]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADER_LIMIT_BYTES = 100_000_000  # the format's own limit
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
PLAIN = ("BF16", "F16", "F32", "F64")  # dtypes whose values are the weights themselves
_DOWNLOAD_AGAIN = "the file is damaged or not a safetensors file: fetch it again"


@dataclass(frozen=True)
class Entry:
    """Where one stored tensor lies."""

    stored: str
    file: Path
    dtype: str  # as safetensors spells it, `INT4` for a weight in words of codes
    shape: tuple[int, ...]
    rows: range | None = None  # of the stored tensor, where that holds several of the model's


class Checkpoint:
    """A model directory. Opening it reads every header and no data; it raises CheckpointError when a file is missing,
    damaged or lies about its size, when the configuration cannot be read, or when a tensor of the model is missing or
    has another shape or a dtype without a reader. `day0check.audit` lists every such fault instead of the first.

    `config`; `unknown_keys` of config.json that no reader asked for; `unexpected` canonical names that the
    configuration does not call for.
    """

    def __init__(self, model_dir: str | os.PathLike[str]) -> None:
        self.directory = Path(model_dir)
        if not self.directory.is_dir():
            raise CheckpointError(
                "there is no such directory", where=str(self.directory), todo="give a model directory with config.json"
            )
        side = {
            part: read_json(self.directory / f"{part}_config.json", optional=True)
            for part in ("preprocessor", "tokenizer")
        }
        where = self.directory / "config.json"
        try:
            self.config: ModelConfig
            self.config, self.unknown_keys = read_config_and_rest(read_json(where), **side)
        except CheckpointError as error:
            raise CheckpointError(error.what, where=f"{self.directory}: {error.where}", todo=error.todo) from error
        entries = _with_parts(_entries(self.directory), self.config)
        self.config = with_stored_draft(self.config, entries)
        self._expected = expected_tensors(self.config)
        self._entries = with_int4(entries, weights=self._expected)
        self._check()
        scales = {other for name in self._expected for other in beside(name, self._entries[name])}
        copies = {f"layers.{len(self.config.layers)}.{name}" for name in DRAFT_COPIES if self.config.draft}
        self.unexpected = tuple(sorted(set(self._entries) - set(self._expected) - scales - copies))

    def names(self) -> tuple[str, ...]:
        """Canonical names of all stored tensors, sorted."""
        return tuple(sorted(self._entries))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> Entry:
        """Where the tensor of canonical `name` lies. Raises CheckpointError when there is none."""
        if name not in self._entries:
            raise CheckpointError(
                f"tensor {name!r} is missing", where=str(self.directory), todo="the checkpoint lacks it under that name"
            )
        return self._entries[name]

    def is_block_fp8(self, name: str) -> bool:
        """Whether the weight of canonical `name` is stored as E4M3 with a scale per block."""
        return name in self._entries and self._entries[name].dtype == BLOCK_FP8 and f"{name}{SCALES}" in self._entries

    def is_int4(self, name: str) -> bool:
        """Whether the weight of canonical `name` is stored as INT4 words with a scale per group of 32 columns."""
        return name in self._entries and self._entries[name].dtype == INT4

    def stored(self, name: str) -> torch.Tensor:
        """The tensor of canonical `name` as the file holds it, padding and codes included, on the CPU. Of a matrix that
        holds several tensors its own rows."""
        entry = self.entry(name)
        tensor = read_tensor(entry.stored, file=entry.file)
        return tensor if entry.rows is None else unpacked(tensor, entry.rows)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of canonical `name` as the model means it, on the CPU: as stored, but for three forms.

        `A_log` is cut to its active heads: released files pad it to the head width (model.md 6.7). A weight in block
        FP8 or INT4 is code times scale in float32, rounded once to bfloat16: DeepSeek's and compressed-tensors' own
        conversions, so that every engine that converts on loading has the same bits. With power-of-two scales this is
        exact, with others within 2^-8. Raises CheckpointError when a weight comes out NaN or infinite, or is of another
        shape than the file says beside its codes.
        """
        tensor = self.stored(name)
        if name.endswith(".A_log"):
            return tensor.flatten()[: self._expected[name].shape[0]]
        if self.is_block_fp8(name):
            return self._finite(name, block_fp8_decode(tensor, self.stored(f"{name}{SCALES}")))
        if self.is_int4(name):
            self._check_int4_shape(name)
            return self._finite(name, int4_decode(tensor, self.stored(f"{name}{GROUP_SCALES}")))
        return tensor

    def _finite(self, name: str, decoded: torch.Tensor) -> torch.Tensor:
        weight = decoded.to(torch.bfloat16)
        if not bool(torch.isfinite(weight).all()):
            raise CheckpointError(
                f"tensor {self.entry(name).stored!r} decodes to values that are not finite",
                where=str(self.entry(name).file),
                todo="a code is NaN or a scale is not finite: the checkpoint is damaged or was quantised wrongly",
            )
        return weight

    def _check_int4_shape(self, name: str) -> None:
        entry = self.entry(name)
        held = list(entry.shape)
        stated = self.stored(f"{name}{SHAPE}").tolist() if f"{name}{SHAPE}" in self else held
        if stated != held:
            raise CheckpointError(
                f"tensor {self.entry(f'{name}{SHAPE}').stored!r} says {stated}; the words hold {held} codes",
                where=str(entry.file),
                todo="the checkpoint was packed wrongly",
            )

    def _check(self) -> None:
        for name, stored in self._expected.items():
            entry = self.entry(name)
            if not fits(name, entry.shape, stored):
                raise CheckpointError(
                    f"tensor {entry.stored!r} has shape {list(entry.shape)}; config.json asks for {list(stored.shape)}",
                    where=str(entry.file),
                    todo="config.json and the weights are not of the same model",
                )
            if stored.dtype == "uint8" and entry.dtype != "U8":
                raise CheckpointError(
                    f"tensor {entry.stored!r} is {entry.dtype}; packed codes and scales are U8", where=str(entry.file)
                )
            if stored.dtype != "uint8" and entry.dtype not in PLAIN:
                self._check_coded(name, entry)

    def _check_coded(self, name: str, entry: Entry) -> None:
        found = self._entries.get(next(iter(beside(name, entry)), ""))
        if found is None:
            raise CheckpointError(
                f"tensor {entry.stored!r} is {entry.dtype} without scales beside it",
                where=str(entry.file),
                todo=f"known: {', '.join(PLAIN)}, F8_E4M3 with NAME{SCALES}, words NAME_packed with NAME{GROUP_SCALES}",
            )
        dtypes, shape = scales_due(entry)
        if found.dtype not in dtypes or found.shape != shape:
            raise CheckpointError(
                f"tensor {found.stored!r} is {found.dtype} {list(found.shape)}; {list(entry.shape)} weights need "
                f"{' or '.join(dtypes)} {list(shape)}",
                where=str(found.file),
                todo="only blocks of 128 x 128 of FP8 and groups of 32 of INT4 are read",
            )


def fits(name: str, shape: tuple[int, ...], stored: Stored) -> bool:
    """Whether a tensor of `shape` can be what the model needs under canonical `name`; A_log may be padded."""
    if name.endswith(".A_log"):
        return math.prod(shape) == max(shape, default=0) >= stored.shape[0]  # Kimi-Linear stores [1, 1, H, 1]
    return shape == stored.shape


def read_tensor(name: str, *, file: str | os.PathLike[str]) -> torch.Tensor:
    """The tensor stored as `name` in the safetensors `file`, on the CPU. Raises CheckpointError."""
    try:
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            return opened.get_tensor(name)
    except (SafetensorError, OSError, KeyError) as error:
        raise CheckpointError(
            f"tensor {name!r} cannot be read: {error}", where=str(file), todo=_DOWNLOAD_AGAIN
        ) from error


def place_tensor(tensor: torch.Tensor, *, transpose: bool | None = None) -> torch.Tensor:
    """The same values where an engine keeps them: as they are, or with the last two axes swapped, contiguous."""
    return (tensor.transpose(-1, -2) if transpose else tensor).contiguous()


def read_header(file: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every tensor in a safetensors file, read from its header alone.

    Raises CheckpointError when the header is not what the file holds: cut off, unreadable, an extent outside the data,
    an extent of another size than the shape, or two extents that overlap or leave a hole.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        head = opened.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
        if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
            raise _damaged(file, f"its header length is {length} bytes, the whole file has {size}")
        text = opened.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:
        raise _damaged(file, f"its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _extent(file, name, value) for name, value in header.items()}
    end = 0
    for begin, stop, name in sorted((e[2], e[3], name) for name, e in entries.items()):
        if begin != end:
            raise _damaged(file, f"tensor {name!r} begins at byte {begin} of the data, byte {end} was due")
        end = stop
    if end != size - 8 - length:
        raise _damaged(file, f"its tensors take {end} bytes of data, the file holds {size - 8 - length}")
    return {name: (dtype, shape) for name, (dtype, shape, _, _) in entries.items()}


def _extent(file: Path, name: str, value: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape, (begin, stop) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, stop)):
            raise ValueError("a negative or fractional number")
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(file, f"the header entry of {name!r} makes no sense ({error})") from error
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != stop - begin:
        raise _damaged(file, f"tensor {name!r} of {dtype} {list(shape)} is given {stop - begin} bytes")
    if stop < begin:
        raise _damaged(file, f"tensor {name!r} ends before it begins")
    return dtype, shape, begin, stop


def _damaged(file: Path, what: str) -> CheckpointError:
    return CheckpointError(what, where=str(file), todo=_DOWNLOAD_AGAIN)


def read_json(file: Path, *, optional: bool = False) -> dict[str, Any]:
    """The JSON object in `file`; {} when it may be absent and is. Raises CheckpointError."""
    if optional and not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError("there is no such file", where=str(file), todo="give a model directory") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"not readable as JSON: {error}", where=str(file), todo="correct or fetch it again"
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError("a JSON object is needed", where=str(file))
    return data


def _entries(directory: Path) -> dict[str, Entry]:
    """Canonical name -> Entry of every tensor, from the index or from the single file."""
    index = directory / INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError("key 'weight_map' must map tensor names to files", where=str(index))
    elif (directory / SINGLE).is_file():
        weight_map = dict.fromkeys(read_header(directory / SINGLE), SINGLE)
    else:
        raise CheckpointError(
            f"there is neither {INDEX} nor {SINGLE}", where=str(directory), todo="give a directory with weights"
        )
    headers = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"file name {shard!r} leaves the directory", where=str(index))
        if not (directory / shard).is_file():
            raise CheckpointError(
                f"the shard {shard} is missing", where=str(directory), todo="fetch it: the index names it"
            )
        headers[shard] = read_header(directory / shard)
    entries = {}
    for stored, shard in weight_map.items():
        if stored not in headers[shard]:
            raise CheckpointError(f"the index places {stored!r} in {shard}, which does not hold it", where=str(index))
        name = canonical_name(stored)
        if name in entries:
            raise CheckpointError(
                f"{stored!r} and {entries[name].stored!r} are the same tensor of the model",
                where=f"{directory / shard} and {entries[name].file}",
                todo="remove the one that is stale",
            )
        entries[name] = Entry(stored, directory / shard, *headers[shard][stored])
    return entries


def _with_parts(entries: dict[str, Entry], config: ModelConfig) -> dict[str, Entry]:
    """The entries with every packed matrix replaced by its parts. Raises CheckpointError for a part that is there
    twice."""
    found = {}
    for name, entry in entries.items():
        parts = packed_parts(name, config)
        if not parts:
            found[name] = entry
            continue
        shapes = part_shapes(parts, entry.shape)
        for part, rows in parts.items():
            if part in entries:
                raise CheckpointError(
                    f"{entries[part].stored!r} is stored by itself and as rows of {entry.stored!r}",
                    where=f"{entries[part].file} and {entry.file}",
                    todo="remove the one that is stale",
                )
            found[part] = replace(entry, shape=shapes[part], rows=rows)
    return found


def write_checkpoint(
    directory: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    json_files: Mapping[str, Mapping[str, Any]],
    shard_bytes: int = 1 << 20,
) -> Path:
    """Writes an HF model directory of (canonical name, tensor) pairs and JSON files, all or nothing.

    A directory that is already there is left as it is: whoever was first wrote the same. Returns `directory`.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        family = json_files.get("config.json", {}).get("model_type", "kimi_k3")
        named = (
            (stored_name(name, family=family), tensor.reshape(stored_shape(name, tuple(tensor.shape), family=family)))
            for name, tensor in tensors
        )
        weight_map, total = _write_shards(work, named, shard_bytes)
        files = {
            **json_files,
            INDEX: {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
        }
        for name, content in files.items():
            (work / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        work.chmod(0o755)
        try:
            work.replace(directory)
        except OSError:
            if not (directory / INDEX).is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return directory


def _write_shards(
    work: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int
) -> tuple[dict[str, str], int]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = total = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor.contiguous()
        filled, total = filled + size, total + size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, str(work / file), metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    return weight_map, total
