"""The part of a checkpoint that one rank holds: heads, columns and experts, read from the files as slices."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from day0check.accelerated.parallel.layout import Layout, Placement, Range, cut, place_experts
from day0check.accelerated.weights import Model, Reader
from day0check.errors import Unavailable
from reference.config import Gqa, ModelConfig
from reference.weights import Checkpoint

GROUP = 32  # columns of an expert that share an E8M0 scale: never cut
LATENT_KINDS = ("mla", "dsa", "dsa_shared")
_PLAIN = ("BF16", "F16", "F32", "F64", "U8")


@dataclass(frozen=True)
class Cut:
    """A tensor of the checkpoint is cut along `axis` to start:stop."""

    axis: int
    start: int
    stop: int


class Shares:
    """What of a model belongs to `rank` of `layout`. Raises Unavailable for a model that cannot be cut so.

    Ranges of this rank: `heads` of latent attention, `kda_heads`, `query_heads` and `key_heads` of grouped queries,
    `columns` of the dense MLP, `shared` columns of the shared expert, `width` of each expert, `vocabulary` rows of the
    head. `placement` of the experts, None without expert parallelism.
    """

    def __init__(self, config: ModelConfig, layout: Layout, rank: int) -> None:
        self.config, self.layout, self.rank = config, layout, rank
        _refuse(config, layout)
        m, k, g, moe = config.mla, config.kda, config.gqa, config.moe
        self.heads = self._mine(m.heads) if m is not None else (0, 0)
        self.kda_heads = self._mine(k.heads) if k is not None else (0, 0)
        self.query_heads, self.key_heads = grouped_heads(g, layout.tensor, rank) if g is not None else ((0, 0), (0, 0))
        self.columns = self._mine(config.mlp_width)
        self.vocabulary = self._mine(config.vocab)
        self.shared = self.width = (0, 0)
        self.placement: Placement | None = None
        if moe is not None:
            self.shared = self._mine(moe.shared_width) if moe.shared_width else (0, 0)
            unit = 1 if moe.packed == "none" else GROUP
            self.width = (0, moe.width) if layout.expert > 1 else self._mine(moe.width, unit=unit)
            if layout.expert > 1:
                self.placement = place_experts(moe.experts, layout.expert, redundant=layout.redundant)

    def _mine(self, count: int, *, unit: int = 1) -> Range:
        return cut(count, self.layout.tensor, unit=unit)[self.rank] if self.layout.tensor > 1 else (0, count)

    def config_of_rank(self) -> ModelConfig:
        """The configuration with the heads of this rank: what its layers are to compute."""
        changed = {}
        if self.config.mla is not None:
            changed["mla"] = dataclasses.replace(self.config.mla, heads=self.heads[1] - self.heads[0])
        if self.config.kda is not None:
            changed["kda"] = dataclasses.replace(self.config.kda, heads=self.kda_heads[1] - self.kda_heads[0])
        if self.config.gqa is not None:
            heads, kv_heads = (stop - start for start, stop in (self.query_heads, self.key_heads))
            changed["gqa"] = dataclasses.replace(self.config.gqa, heads=heads, kv_heads=kv_heads)
        return dataclasses.replace(self.config, **changed)

    def held_experts(self) -> tuple[int, ...]:
        if self.placement is None:
            return tuple(range(self.config.moe.experts))
        return self.placement.held_by(self.rank)

    def cut_of(self, name: str) -> Cut | None:
        """How the tensor of canonical `name` is cut; None where every rank has all of it."""
        if self.layout.tensor == 1:
            return None
        if name == "lm_head.weight":
            return Cut(0, *self.vocabulary)
        found = re.fullmatch(r"layers\.(\d+)\.(self_attn|mlp|block_sparse_moe)\.(.+)", name)
        if found is None or int(found[1]) >= len(self.config.every_layer):
            return None
        place, part = found[2], found[3]
        if place == "self_attn":
            kind = self.config.every_layer[int(found[1])]
            return {"kda": self._kda, "gqa": self._grouped}.get(kind, self._latent)(part)
        if place == "mlp":
            return _mlp(part, self.columns)
        if part.startswith("shared_experts."):
            return _mlp(part.removeprefix("shared_experts."), self.shared)
        return self._expert(part)

    def _kda(self, part: str) -> Cut | None:
        name, k = part.removesuffix(".weight"), self.config.kda
        full = "g_proj" if k.full_rank_gate else "g_b_proj"
        if name in ("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "f_b_proj", "dt_bias", full):
            return Cut(0, *_scaled(self.kda_heads, k.dim))
        if name in ("b_proj", "a_proj", "A_log"):
            return Cut(0, *self.kda_heads)
        return Cut(1, *_scaled(self.kda_heads, k.dim)) if name == "o_proj" else None

    def _grouped(self, part: str) -> Cut | None:
        name, dim = part.removesuffix(".weight"), self.config.gqa.dim
        if name in ("q_proj", "q_norm"):
            return Cut(0, *_scaled(self.query_heads, dim))
        if name in ("k_proj", "v_proj", "k_norm"):
            return Cut(0, *_scaled(self.key_heads, dim))
        return Cut(1, *_scaled(self.query_heads, dim)) if name == "o_proj" else None

    def _latent(self, part: str) -> Cut | None:
        m = self.config.mla
        units = {"q_b_proj": m.nope + m.rope, "kv_b_proj": m.nope + m.v, "g_proj": m.v}
        if m.q_lora is None:
            units["q_proj"] = m.nope + m.rope
        name = part.removesuffix(".weight")
        if name in units:
            return Cut(0, *_scaled(self.heads, units[name]))
        return Cut(1, *_scaled(self.heads, m.v)) if name == "o_proj" else None

    def _expert(self, part: str) -> Cut | None:
        found = re.fullmatch(r"experts\.\d+\.(w1|w2|w3)\.weight(_packed|_scale)?", part)
        if found is None or self.layout.expert > 1:
            return None
        if found[1] != "w2":
            return Cut(0, *self.width)
        per_column = {None: 1, "_packed": 2, "_scale": GROUP}[found[2]]
        return Cut(1, self.width[0] // per_column, -(-self.width[1] // per_column))


def grouped_heads(g: Gqa, ranks: int, rank: int) -> tuple[Range, Range]:
    """Query heads and key heads of a rank: whole groups, or where there are fewer key heads than ranks one key head,
    which neighbours share, and a part of its queries. Raises Unavailable where that does not come out even."""
    each = g.heads // g.kv_heads
    if ranks <= g.kv_heads:
        start, stop = cut(g.kv_heads, ranks)[rank]
        return (start * each, stop * each), (start, stop)
    sharing = ranks // g.kv_heads
    if ranks % g.kv_heads or each < sharing:
        what = f"{g.heads} query heads of {g.kv_heads} key heads cannot be cut over {ranks} ranks"
        raise Unavailable(what, where="--tp", todo="give a multiple of the key heads, or fewer ranks")
    key = rank // sharing
    start, stop = cut(each, sharing)[rank % sharing]
    return (key * each + start, key * each + stop), (key, key + 1)


def _scaled(heads: Range, unit: int) -> Range:
    return heads[0] * unit, heads[1] * unit


def _mlp(part: str, columns: Range) -> Cut | None:
    if part in ("gate_proj.weight", "up_proj.weight"):
        return Cut(0, *columns)
    return Cut(1, *columns) if part == "down_proj.weight" else None


def _refuse(config: ModelConfig, layout: Layout) -> None:
    if layout.tensor == 1:
        return
    other = sorted(set(config.every_layer) - {"kda", "gqa", *LATENT_KINDS})
    if other:
        raise Unavailable(f"layers of kind {other[0]!r} cannot be cut over ranks", where="--tp", todo="use --ep")
    m, k, moe = config.mla, config.kda, config.moe
    units = {"attention heads": m and m.heads, "KDA heads": k and k.heads, "MLP columns": config.mlp_width}
    if moe is not None:
        units["columns of the shared expert"] = moe.shared_width
        if layout.expert == 1:
            packed = moe.packed != "none"
            what = f"blocks of {GROUP} columns of an expert" if packed else "columns of an expert"
            units[what] = -(-moe.width // (GROUP if packed else 1))
    for what, count in units.items():
        if count and count < layout.tensor:
            todo = "give fewer ranks" if "expert" not in what else "give fewer ranks, or cut experts whole with --ep"
            raise Unavailable(f"{count} {what} cannot be cut over {layout.tensor} ranks", where="--tp", todo=todo)


class ShardReader(Reader):
    """Reads what belongs to one rank: of a tensor that is cut no more than its slice is read."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, *, shares: Shares) -> None:
        super().__init__(checkpoint, dtype, device)
        self.shares, self.config = shares, shares.config_of_rank()

    def experts(self) -> tuple[int, ...]:
        return self.shares.held_experts()

    def __call__(self, name: str) -> Tensor:
        where = self.shares.cut_of(name)
        if where is None:
            return super().__call__(name)
        stored = self.piece(name, where)
        return stored.to(self.device, self.dtype if stored.dtype == torch.bfloat16 else stored.dtype)

    def piece(self, name: str, where: Cut) -> Tensor:
        """The slice of the tensor of canonical `name`, on the CPU, in its stored type."""
        entry = self.checkpoint.entry(name)
        by_itself = entry.rows is None and len(entry.shape) > where.axis and not name.endswith(".A_log")
        if by_itself and entry.dtype in _PLAIN:
            with safe_open(str(entry.file), framework="pt") as opened:
                lazy = opened.get_slice(entry.stored)
                return lazy[where.start : where.stop] if where.axis == 0 else lazy[:, where.start : where.stop]
        whole = self.checkpoint.tensor(name)  # padded, one of several in a matrix, or decoded block by block
        return whole.narrow(where.axis, where.start, where.stop - where.start).contiguous()

    def finished(self, model: Model) -> Model:
        """The model whose head is cut also where it is the embedding."""
        if not self.checkpoint.config.tied_head or self.shares.layout.tensor == 1:
            return model
        start, stop = self.shares.vocabulary
        return dataclasses.replace(model, head=model.embed[start:stop])
