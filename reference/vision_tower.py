"""MoonViT (Kimi K3, K2.5) as a sequence of operator calls: tower, merger and projector (model.md 2.9)."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reference import residual, vision
from reference.layers import Here
from reference.linear import linear
from reference.norm import layer_norm, rms_norm

Image = str | os.PathLike[str] | Tensor
Grid = tuple[int, int, int]


def features(top: Here, images: Sequence[Image], *, device: str, dtype: torch.dtype) -> Tensor:
    """Features [tokens, D] of the images in order. `top` is at the place "vision", without a prefix."""
    here = replace(top, prefix="vision_tower.")
    pixels, grids = zip(*(_pixels(here, image, device, dtype) for image in images), strict=True)
    return of_patches(top, torch.cat(pixels), grids=grids)


def of_patches(top: Here, pixels: Tensor, *, grids: Sequence[Grid]) -> Tensor:
    """As `features`, from normalised patches [P, 3*patch*patch] of images and of clips of several frames."""
    v = top.config.vision
    here = replace(top, prefix="vision_tower.")
    ends = image_ends(grids, device=str(pixels.device))
    kernel = here.weight("patch_embed.proj").flatten(1)
    x = here("vision.patch", linear, pixels, weight=kernel, bias=_bias(here, "patch_embed.proj"))
    table = here.weight("patch_embed.pos_emb")
    x = here("vision.position", vision.add_position, x, table=table, grids=grids, mode=v.interpolation)
    for number in range(v.layers):
        place = f"vision.blocks.{number:02d}"
        x = _block(replace(here, place=place, prefix=f"vision_tower.encoder.blocks.{number}."), x, grids, ends)
    x = _norm(here, x, "encoder.final_layernorm", site="vision_final")
    x = here("vision.merge", vision.merge_patches, x, grids=grids, merge=v.merge)
    return _project(replace(here, prefix="mm_projector."), x)


def image_ends(grids: Sequence[Grid], *, device: str) -> Tensor:
    """int64 [images + 1]: where each image's patches begin, and where the last one's end."""
    return torch.tensor([0, *(math.prod(g) for g in grids)], device=device).cumsum(0)


def _pixels(here: Here, image: Image, device: str, dtype: torch.dtype) -> tuple[Tensor, Grid]:
    v = here.config.vision
    pixels, grid = here(
        "image.preprocess",
        vision.preprocess,
        image if isinstance(image, Tensor) else vision.read_image(image),
        patch=v.patch,
        merge=v.merge,
        patch_limit=v.patch_limit,
        side_limit=v.side_limit,
        mean=v.image_mean,
        std=v.image_std,
    )
    return pixels.to(device, dtype), tuple(grid.tolist())


def _bias(here: Here, name: str) -> Tensor | None:
    return here.tensor(f"{name}.bias") if here.config.vision.bias else None


def _norm(here: Here, x: Tensor, name: str, *, site: str) -> Tensor:
    v, weight = here.config.vision, here.weight(name)
    if v.norm == "layer":
        return here("norm.layer", layer_norm, x, weight=weight, bias=here.tensor(f"{name}.bias"), eps=v.eps, site=site)
    return here("norm.rms", rms_norm, x, weight=weight, eps=v.eps, site=site)


def _block(here: Here, x: Tensor, grids: Sequence[Grid], ends: Tensor) -> Tensor:
    v = here.config.vision
    qkv = here(
        "vision.qkv",
        linear,
        _norm(here, x, "norm0", site="norm0"),
        weight=here.weight("wqkv"),
        bias=_bias(here, "wqkv"),
    )
    q, k, value = qkv.unflatten(-1, (3, v.heads, v.head_dim)).unbind(1)
    q = here("vision.rope", vision.rope_2d, q, grids=grids, theta=v.rope_theta, site="query")
    k = here("vision.rope", vision.rope_2d, k, grids=grids, theta=v.rope_theta, site="key")
    o = here("vision.attention", vision.attention, q, k=k, v=value, offsets=ends, scale=v.head_dim**-0.5)
    o = here("vision.output", linear, o.flatten(1), weight=here.weight("wo"), bias=_bias(here, "wo"))
    x = here("residual.add", residual.add, x, y=o, site="attention")
    h = here(
        "vision.mlp",
        vision.mlp,
        _norm(here, x, "norm1", site="norm1"),
        fc0=here.weight("mlp.fc0"),
        fc1=here.weight("mlp.fc1"),
        bias0=_bias(here, "mlp.fc0"),
        bias1=_bias(here, "mlp.fc1"),
    )
    return here("residual.add", residual.add, x, y=h, site="mlp")


def _project(here: Here, x: Tensor) -> Tensor:
    """K3: norm behind the projector. K2.5: LayerNorm of each patch in front of it, biases, no norm behind."""
    v = here.config.vision
    weights = {"w0": here.weight("proj.0"), "w1": here.weight("proj.2")}
    if not v.projector_pre_norm:
        norm = here.weight("post_norm")
        return here("vision.project", vision.project, x, **weights, norm_weight=norm, eps=v.projector_eps)
    x = here(
        "norm.layer",
        layer_norm,
        x.unflatten(-1, (-1, v.hidden)),
        weight=here.weight("pre_norm"),
        bias=here.tensor("pre_norm.bias"),
        eps=v.projector_eps,
        site="projector",
    )
    biases = {"bias0": _bias(here, "proj.0"), "bias1": _bias(here, "proj.2")}
    return here("vision.project_plain", vision.project_plain, x.flatten(1), **weights, **biases)
