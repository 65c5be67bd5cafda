"""The weights of a checkpoint as the engine keeps them: on the device, in the activation type, experts still packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from day0check.accelerated.tower_weights import GlmTower, MoonVit, read_tower
from day0check.errors import InputError
from reference.config import ModelConfig
from reference.weights import Checkpoint

NAN_EXPONENT = 255  # of E8M0


@dataclass(frozen=True)
class Mix:
    norm: Tensor  # [D]
    proj: Tensor  # [D]


@dataclass(frozen=True)
class Streams:
    """The projection that gives the mHC coefficients of a sublayer."""

    fn: Tensor  # [N*(2+N), N*D]
    base: Tensor  # [N*(2+N)] float32
    scale: Tensor  # [3] float32


@dataclass(frozen=True)
class Mlp:
    gate: Tensor  # [I, D]
    up: Tensor  # [I, D]
    down: Tensor  # [D, I]


@dataclass(frozen=True)
class Stack:
    """One matrix of all experts of a layer: [E, N, K] plain, or [E, N, K/2] codes with [E, N, K/32] E8M0 bytes."""

    weight: Tensor
    scale: Tensor | None

    @property
    def rows(self) -> int:
        return self.weight.shape[1]

    @property
    def columns(self) -> int:
        return self.weight.shape[2] * (1 if self.scale is None else 2)


@dataclass(frozen=True)
class Moe:
    router: Tensor  # [E, D]
    bias: Tensor | None  # [E] float32
    down: Tensor | None  # [L, D]
    norm: Tensor | None  # [L]
    up: Tensor | None  # [D, L]
    shared: Mlp | None
    w1: Stack
    w3: Stack
    w2: Stack


@dataclass(frozen=True)
class Kda:
    q: Tensor
    k: Tensor
    v: Tensor
    f_a: Tensor  # [H, D] where a head has one decay
    f_b: Tensor | None
    beta: Tensor
    gate: tuple[Tensor, ...]  # one full-rank matrix or the two factors of a low-rank one
    conv: Tensor  # [C, W], channels q | k | v
    a_log: Tensor  # [H] float32
    dt_bias: Tensor  # [H, dk] float32
    norm: Tensor  # [dv] float32
    output: Tensor


@dataclass(frozen=True)
class Gqa:
    q: Tensor
    k: Tensor
    v: Tensor
    query_norm: Tensor  # [H, d]
    key_norm: Tensor  # [Hk, d]
    output: Tensor


@dataclass(frozen=True)
class Index:
    query: Tensor
    weights: Tensor
    key: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    pool_gate: Tensor | None  # [dI, D], where keys are pooled
    pool_place: Tensor | None  # [P, dI] added to the gates of a pool's tokens


@dataclass(frozen=True)
class Mla:
    query_down: Tensor | None
    query_norm: Tensor | None
    query_up: Tensor  # from the latent, or direct when there is none
    latent: Tensor
    latent_norm: Tensor
    absorb: Tensor  # [H, dn, c]
    value: Tensor  # [H, c, dv]
    gate: Tensor | None
    output: Tensor
    index: Index | None
    cache_scale: Tensor | None = None  # [1] float32, of plain FP8 codes in the cache


@dataclass(frozen=True)
class Layer:
    input_norm: Tensor
    post_norm: Tensor
    attention_mix: Mix | Streams | None
    mlp_mix: Mix | Streams | None
    attention: Kda | Mla | Gqa
    mlp: Mlp | Moe


@dataclass(frozen=True)
class Draft:
    """The layer that drafts tokens; embedding and head are the model's."""

    embedding_norm: Tensor
    hidden_norm: Tensor
    project: Tensor  # [D, 2 D], the embedding's half first
    layer: Layer
    head_norm: Tensor


@dataclass(frozen=True)
class Model:
    embed: Tensor
    layers: tuple[Layer, ...]
    output_mix: Mix | None
    final_norm: Tensor
    head: Tensor
    vision: MoonVit | GlmTower | None
    draft: Draft | None = None


class Reader:
    """Reads tensors by canonical name: bfloat16 ones become the activation type, everything else stays as stored.

    `config`: that of the checkpoint; a reader that gives each rank its part says how many heads these are.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.checkpoint, self.dtype, self.device = checkpoint, dtype, device
        self.config = checkpoint.config

    def experts(self) -> Sequence[int]:
        """The experts that a stack holds, in its order."""
        return range(self.config.moe.experts)

    def __call__(self, name: str) -> Tensor:
        stored = self.checkpoint.tensor(name)
        return stored.to(self.device, self.dtype if stored.dtype == torch.bfloat16 else stored.dtype)

    def mlp(self, prefix: str) -> Mlp:
        return Mlp(*(self(f"{prefix}.{part}_proj.weight") for part in ("gate", "up", "down")))

    def mix(self, prefix: str) -> Mix:
        return Mix(self(f"{prefix}_norm.weight"), self(f"{prefix}_proj.weight").flatten())

    def residual(self, place: str, kind: str, mix: str, streams: str) -> Mix | Streams | None:
        """What a sublayer of the layer at `place` reads the residual spine with."""
        if kind == "plain":
            return None
        if kind == "attention":
            return self.mix(f"{place}.{mix}")
        return Streams(*(self(f"{place}.{streams}_{part}") for part in ("fn", "base", "scale")))

    def stack(self, prefix: str, part: str, config: ModelConfig) -> Stack:
        names = [f"{prefix}.experts.{e}.{part}.weight" for e in self.experts()]
        if config.moe.packed == "none":
            return Stack(self._side_by_side(names), None)
        scale = self._side_by_side([f"{name}_scale" for name in names])
        broken = (scale == NAN_EXPONENT).flatten(1).any(1).nonzero().flatten().tolist()
        if broken:
            raise InputError(
                "an E8M0 scale byte is 255, which means NaN",
                where=f"{self.checkpoint.directory}: {names[broken[0]]}_scale",
                todo="the checkpoint is damaged or was quantised wrongly",
            )
        return Stack(self._side_by_side([f"{name}_packed" for name in names]), scale)

    def _side_by_side(self, names: Sequence[str]) -> Tensor:
        """Tensors of one shape as [names, ...], read one after the other into memory taken once: a list of them beside
        their stack would hold every expert twice, and small pieces given back leave holes that stay resident."""
        first = self(names[0])
        every = first.new_empty(len(names), *first.shape)
        every[0] = first
        for number, name in enumerate(names[1:], 1):
            every[number] = self(name)
        return every


def read_model(
    checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, read: Reader | None = None
) -> Model:
    """All weights of `checkpoint` on `device`, activations' weights in `dtype`; or what `read` gives of them.

    Raises CheckpointError for what cannot be read and InputError for an expert scale that is NaN.
    """
    read = Reader(checkpoint, dtype, device) if read is None else read
    config = read.config
    attnres = config.residual.kind == "attention"
    embed = read("embed_tokens.weight")
    return Model(
        embed=embed,
        layers=tuple(_layer(read, config, number) for number in range(len(config.layers))),
        output_mix=read.mix("output_attn_res") if attnres else None,
        final_norm=read("norm.weight"),
        head=embed if config.tied_head else read("lm_head.weight"),
        vision=None if config.vision is None else read_tower(read, config.vision),
        draft=None if config.draft is None else _draft(read, config),
    )


def _draft(read: Reader, config: ModelConfig) -> Draft:
    place = f"layers.{len(config.layers)}"
    return Draft(
        embedding_norm=read(f"{place}.enorm.weight"),
        hidden_norm=read(f"{place}.hnorm.weight"),
        project=read(f"{place}.eh_proj.weight"),
        layer=_layer(read, config, len(config.layers)),
        head_norm=read(f"{place}.shared_head.norm.weight"),
    )


def _layer(read: Reader, config: ModelConfig, number: int) -> Layer:
    place = f"layers.{number}"
    kind, spine = config.every_layer[number], config.residual.kind
    spine = spine if number < len(config.layers) else "plain"
    return Layer(
        input_norm=read(f"{place}.input_layernorm.weight"),
        post_norm=read(f"{place}.post_attention_layernorm.weight"),
        attention_mix=read.residual(place, spine, "self_attention_res", "hc_attn"),
        mlp_mix=read.residual(place, spine, "mlp_res", "hc_ffn"),
        attention=_attention(read, config, number, kind),
        mlp=_moe(read, config, f"{place}.block_sparse_moe") if config.is_moe(number) else read.mlp(f"{place}.mlp"),
    )


def _attention(read: Reader, config: ModelConfig, number: int, kind: str) -> Kda | Mla | Gqa:
    place = f"layers.{number}.self_attn"
    if kind == "kda":
        return _kda(read, config, place)
    return _gqa(read, config, place) if kind == "gqa" else _mla(read, config, number)


def _gqa(read: Reader, config: ModelConfig, place: str) -> Gqa:
    g = config.gqa
    return Gqa(
        **{part: read(f"{place}.{part}_proj.weight") for part in "qkv"},
        query_norm=read(f"{place}.q_norm.weight").view(g.heads, g.dim),
        key_norm=read(f"{place}.k_norm.weight").view(g.kv_heads, g.dim),
        output=read(f"{place}.o_proj.weight"),
    )


def _kda(read: Reader, config: ModelConfig, place: str) -> Kda:
    k = config.kda
    gate = ("g",) if k.full_rank_gate else ("g_a", "g_b")
    return Kda(
        **{part: read(f"{place}.{part}_proj.weight") for part in "qkv"},
        f_a=read(f"{place}.{'a' if k.decay == 'per_head' else 'f_a'}_proj.weight"),
        f_b=None if k.decay == "per_head" else read(f"{place}.f_b_proj.weight"),
        beta=read(f"{place}.b_proj.weight"),
        gate=tuple(read(f"{place}.{part}_proj.weight") for part in gate),
        conv=torch.cat([read(f"{place}.{part}_conv1d.weight").squeeze(1) for part in "qkv"]),
        a_log=read(f"{place}.A_log"),
        dt_bias=read(f"{place}.dt_bias").view(k.heads, k.dim),
        norm=read(f"{place}.o_norm.weight"),
        output=read(f"{place}.o_proj.weight"),
    )


def _mla(read: Reader, config: ModelConfig, number: int) -> Mla:
    m, place = config.mla, f"layers.{number}.self_attn"
    low_rank = m.q_lora is not None
    per_head = read(f"{place}.kv_b_proj.weight").view(m.heads, m.nope + m.v, m.kv_lora)
    return Mla(
        query_down=read(f"{place}.q_a_proj.weight") if low_rank else None,
        query_norm=read(f"{place}.q_a_layernorm.weight") if low_rank else None,
        query_up=read(f"{place}.{'q_b' if low_rank else 'q'}_proj.weight"),
        latent=read(f"{place}.kv_a_proj_with_mqa.weight"),
        latent_norm=read(f"{place}.kv_a_layernorm.weight"),
        absorb=per_head[:, : m.nope].contiguous(),
        value=per_head[:, m.nope :].transpose(1, 2).contiguous(),
        gate=read(f"{place}.g_proj.weight") if m.gate else None,
        output=read(f"{place}.o_proj.weight"),
        index=_index(read, config, f"{place}.indexer") if config.every_layer[number] == "dsa" else None,
        cache_scale=read(f"{place}.k_scale") if m.cache_scale else None,
    )


def _index(read: Reader, config: ModelConfig, place: str) -> Index:
    pooled = config.index.pool > 1
    return Index(
        query=read(f"{place}.wq_b.weight"),
        weights=read(f"{place}.weights_proj.weight"),
        key=read(f"{place}.wk.weight"),
        norm_weight=read(f"{place}.k_norm.weight"),
        norm_bias=read(f"{place}.k_norm.bias"),
        pool_gate=read(f"{place}.index_kpool_compress_gate") if pooled else None,
        pool_place=read(f"{place}.index_kpool_compress_ape") if pooled else None,
    )


def _moe(read: Reader, config: ModelConfig, place: str) -> Moe:
    m = config.moe
    bias = f"{place}.gate.e_score_correction_bias"
    return Moe(
        router=read(f"{place}.gate.weight"),
        bias=read(bias) if bias in read.checkpoint else None,
        down=read(f"{place}.routed_expert_down_proj.weight") if m.latent else None,
        norm=read(f"{place}.routed_expert_norm.weight") if m.latent and m.latent_norm else None,
        up=read(f"{place}.routed_expert_up_proj.weight") if m.latent else None,
        shared=read.mlp(f"{place}.shared_experts") if m.shared_width else None,
        **{part: read.stack(place, part, config) for part in ("w1", "w3", "w2")},
    )
