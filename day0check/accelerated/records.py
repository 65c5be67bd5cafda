"""The form in which caches keep what is written into them: as it is, or as records of E4M3 codes with their scales.

A record of a latent is [c codes | a float32 scale per 128 codes | rope part in bfloat16]: 656 bytes for c = 512 and a
rope part of 64. One of an index key is its codes and scales: 132 bytes for 128. Where the checkpoint has calibrated
scales, a latent row is plain codes, 576 bytes. KDA states are float32 or bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from day0check.accelerated.ops.records import BLOCK, SCALE_BYTES
from day0check.errors import UsageError
from day0check.probe.recorder import Here
from day0check.probe.registry import OwnedPool
from day0check.probe.rows import RowMap

if TYPE_CHECKING:
    from reference.config import ModelConfig

KV, INDEX, STATE = ("act", "fp8"), ("act", "fp8"), ("float32", "bfloat16")


@dataclass(frozen=True)
class Formats:
    """`kv` and `index`: "act", the activation type, or "fp8" records; `state`: the type of KDA states."""

    kv: str = "act"
    index: str = "act"
    state: str = "float32"

    def check(self, config: ModelConfig, dtype: torch.dtype) -> None:
        """Raises UsageError for a format that there is not, or not for this model and activation type."""
        for name, known in (("kv", KV), ("index", INDEX), ("state", STATE)):
            if getattr(self, name) not in known:
                raise UsageError(
                    f"no format {getattr(self, name)!r}", where=f"{name} cache", todo=f"use one of {', '.join(known)}"
                )
        if self == Formats():
            return
        if dtype != torch.bfloat16:
            raise UsageError(
                f"caches narrower than {dtype} are not offered", where="cache formats", todo="use a bf16 profile"
            )
        if self.kv == "fp8" and "gqa" in config.layers:
            raise UsageError(
                "grouped keys and values have no FP8 record", where="kv cache", todo="leave the kv format as it is"
            )

    def kv_row(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """(width, type) of a row of the latent pool."""
        width = config.cache_width(layer)
        if self.kv == "act":
            return width, dtype
        if config.mla.cache_scale:
            return width, torch.uint8
        return record_bytes(config.mla.kv_lora, width - config.mla.kv_lora), torch.uint8

    def index_row(self, config: ModelConfig, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """(width, type) of a row of the pool of index keys."""
        dim = config.index.dim
        return (dim, dtype) if self.index == "act" else (record_bytes(dim, 0), torch.uint8)

    def state_type(self, dtype: torch.dtype) -> torch.dtype:
        """Type of a KDA state for this activation type."""
        if dtype == torch.float64:
            return dtype
        return torch.bfloat16 if self.state == "bfloat16" else torch.float32


def record_bytes(codes: int, rest: int) -> int:
    """Bytes of a record of `codes` codes and `rest` values in bfloat16."""
    return codes + SCALE_BYTES * -(-codes // BLOCK) + 2 * rest


def kept(at: Here, value: Tensor, pool: Tensor | OwnedPool, *, codes: int, scale: Tensor | None) -> Tensor:
    """A latent row [rows, codes + rest] as its pool keeps it: itself, plain codes at a calibrated `scale`, a record."""
    if pool.dtype != torch.uint8:
        return value
    if scale is not None:
        return at("kv.quantise", value, scale=scale).view(torch.uint8)
    return packed(at, value, site="kv", codes=codes)


def given_back(at: Here, rows: Tensor, *, codes: int, scale: Tensor | None, row_map: RowMap | None = None) -> Tensor:
    """The values of gathered latent rows."""
    if rows.dtype == torch.uint8 and scale is not None:
        return at("kv.dequantise", rows.view(torch.float8_e4m3fn), row_map=row_map, scale=scale)
    return unpacked(at, rows, site="kv", codes=codes, row_map=row_map)


def packed(at: Here, value: Tensor, *, site: str, codes: int, row_map: RowMap | None = None) -> Tensor:
    """Records uint8 [rows, bytes] of `value` [rows, codes + rest]."""
    quantised, rest = value.split((codes, value.shape[1] - codes), -1)
    e4m3, scale = at("quantise.rows", quantised.contiguous(), site=f"{site}.record", row_map=row_map)
    return at("kv.pack", e4m3, site=site, row_map=row_map, scale=scale, rest=rest)


def unpacked(at: Here, rows: Tensor, *, site: str, codes: int, row_map: RowMap | None = None) -> Tensor:
    """Values [..., codes + rest] of rows that a cache gave back; rows that are no records are values already."""
    if rows.dtype != torch.uint8:
        return rows
    return at("kv.unpack", rows, site=site, row_map=row_map, width=codes)
