"""The weights of a vision tower and its projector: MoonViT (Kimi K3, K2.5) and the tower of GLM-5.3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.config import Vision as VisionConfig

Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Affine:
    """A linear layer, or a norm: without a bias where the model has none."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class MoonBlock:
    norm0: Affine
    qkv: Affine
    output: Affine
    norm1: Affine
    fc0: Affine
    fc1: Affine


@dataclass(frozen=True)
class MoonVit:
    """K3 has a norm behind the projector, K2.5 one in front of it."""

    patch: Affine  # [Dv, 3*patch*patch]
    table: Tensor  # [h, w, Dv]
    blocks: tuple[MoonBlock, ...]
    final_norm: Affine
    before: Affine | None
    project0: Affine
    project1: Affine
    behind: Affine | None


@dataclass(frozen=True)
class Gated:
    gate: Affine
    up: Affine
    down: Affine


@dataclass(frozen=True)
class GlmBlock:
    norm0: Affine
    qkv: Affine
    query_norm: Affine
    key_norm: Affine
    output: Affine
    norm1: Affine
    mlp: Gated


@dataclass(frozen=True)
class GlmTower:
    patch: Affine  # [Dv, 3*patch*patch] float32 at least: the sum over the frames of a still image, not rounded
    blocks: tuple[GlmBlock, ...]
    final_norm: Affine
    downsample: Affine  # [out, merge*merge*Dv], inside a group row by row
    project: Affine
    project_norm: Affine
    mlp: Gated


def read_tower(read: Read, config: VisionConfig) -> MoonVit | GlmTower:
    """The tower of a model that has one; `read` gives a tensor by canonical name."""
    return _glm(read, config) if config.kind == "glm" else _moonvit(read, config)


def _affine(read: Read, name: str, has_bias: bool) -> Affine:
    return Affine(read(f"{name}.weight"), read(f"{name}.bias") if has_bias else None)


def _moonvit(read: Read, config: VisionConfig) -> MoonVit:
    tower, projector = "vision_tower", "mm_projector"
    layered = config.norm == "layer"

    def linear(name: str) -> Affine:
        return _affine(read, name, config.bias)

    blocks = []
    for number in range(config.layers):
        at = f"{tower}.encoder.blocks.{number}"
        blocks.append(
            MoonBlock(
                norm0=_affine(read, f"{at}.norm0", layered),
                qkv=linear(f"{at}.wqkv"),
                output=linear(f"{at}.wo"),
                norm1=_affine(read, f"{at}.norm1", layered),
                fc0=linear(f"{at}.mlp.fc0"),
                fc1=linear(f"{at}.mlp.fc1"),
            )
        )
    patch = linear(f"{tower}.patch_embed.proj")
    first = config.projector_pre_norm
    return MoonVit(
        patch=Affine(patch.weight.flatten(1), patch.bias),
        table=read(f"{tower}.patch_embed.pos_emb.weight"),
        blocks=tuple(blocks),
        final_norm=_affine(read, f"{tower}.encoder.final_layernorm", layered),
        before=_affine(read, f"{projector}.pre_norm", True) if first else None,
        project0=linear(f"{projector}.proj.0"),
        project1=linear(f"{projector}.proj.2"),
        behind=None if first else _affine(read, f"{projector}.post_norm", False),
    )


def _glm(read: Read, config: VisionConfig) -> GlmTower:
    def gated(at: str, has_bias: bool) -> Gated:
        return Gated(*(_affine(read, f"{at}{part}_proj", has_bias) for part in ("gate", "up", "down")))

    blocks = []
    for number in range(config.layers):
        at = f"visual.blocks.{number}."
        blocks.append(
            GlmBlock(
                norm0=_affine(read, f"{at}norm1", False),
                qkv=_affine(read, f"{at}attn.qkv", config.bias),
                query_norm=_affine(read, f"{at}attn.q_norm", False),
                key_norm=_affine(read, f"{at}attn.k_norm", False),
                output=_affine(read, f"{at}attn.proj", config.bias),
                norm1=_affine(read, f"{at}norm2", False),
                mlp=gated(f"{at}mlp.", config.bias),
            )
        )
    kernel = read("visual.patch_embed.proj.weight")
    frames = kernel.to(torch.promote_types(kernel.dtype, torch.float32)).sum(2)
    joined = read("visual.downsample.weight").permute(0, 2, 3, 1).flatten(1)
    return GlmTower(
        patch=Affine(frames.flatten(1), read("visual.patch_embed.proj.bias")),
        blocks=tuple(blocks),
        final_norm=_affine(read, "visual.post_layernorm", False),
        downsample=Affine(joined.contiguous(), read("visual.downsample.bias")),
        project=_affine(read, "visual.merger.proj", False),
        project_norm=_affine(read, "visual.merger.post_projection_norm", True),
        mlp=gated("visual.merger.", False),
    )
