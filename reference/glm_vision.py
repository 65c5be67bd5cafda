"""The vision tower of GLM-5.3 as a sequence of operator calls.

RMSNorms also on queries and keys, axial rotary embedding, clamped SwiGLU with biases, a strided convolution that joins
2 x 2 patches, and a merger of its own. Patches are kept row-major; upstream keeps them by merge group, which attention
cannot tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reference import residual, vision
from reference.layers import Here
from reference.linear import linear
from reference.norm import rms_norm
from reference.vision_tower import Grid, Image, image_ends

MERGER_EPS = 1e-5  # torch's default of LayerNorm, which upstream leaves as it is


def features(top: Here, images: Sequence[Image], *, device: str, dtype: torch.dtype) -> Tensor:
    """Features [tokens, D] of the images in order. `top` is at the place "vision", without a prefix."""
    v = top.config.vision
    here = replace(top, prefix="visual.")
    pixels, grids = zip(*(_pixels(here, image, device, dtype) for image in images), strict=True)
    ends = image_ends(grids, device=device)
    kernel = here.weight("patch_embed.proj").sum(2).flatten(1)  # every frame of a still image is the same
    x = here("vision.patch", linear, torch.cat(pixels), weight=kernel, bias=here.tensor("patch_embed.proj.bias"))
    for number in range(v.layers):
        x = _block(
            replace(here, place=f"vision.blocks.{number:02d}", prefix=f"visual.blocks.{number}."), x, grids, ends
        )
    x = _norm(here, x, "post_layernorm", site="vision_final")
    x = here("vision.merge", vision.merge_patches, x, grids=grids, merge=v.merge)
    kernel = here.weight("downsample").permute(0, 2, 3, 1).flatten(1)  # inside a group (kh, kw), then channels
    x = here("vision.downsample", linear, x, weight=kernel, bias=here.tensor("downsample.bias"))
    return _merge(replace(here, prefix="visual.merger."), x)


def _pixels(here: Here, image: Image, device: str, dtype: torch.dtype) -> tuple[Tensor, Grid]:
    v = here.config.vision
    pixels, grid = here(
        "image.preprocess_in_budget",
        vision.preprocess_in_budget,
        image if isinstance(image, Tensor) else vision.read_image(image),
        patch=v.patch,
        merge=v.merge,
        min_tokens=v.min_tokens,
        max_tokens=v.max_tokens,
        mean=v.image_mean,
        std=v.image_std,
    )
    return pixels.to(device, dtype), tuple(grid.tolist())


def _norm(here: Here, x: Tensor, name: str, *, site: str) -> Tensor:
    return here("norm.rms", rms_norm, x, weight=here.weight(name), eps=here.config.vision.eps, site=site)


def _bias(here: Here, name: str) -> Tensor | None:
    return here.tensor(f"{name}.bias") if here.config.vision.bias else None


def _block(here: Here, x: Tensor, grids: Sequence[Grid], ends: Tensor) -> Tensor:
    v = here.config.vision

    def project(operator: str, z: Tensor, name: str) -> Tensor:
        return here(operator, linear, z, weight=here.weight(name), bias=_bias(here, name))

    qkv = project("vision.qkv", _norm(here, x, "norm1", site="norm0"), "attn.qkv")
    q, k, value = qkv.unflatten(-1, (3, v.heads, v.head_dim)).unbind(1)
    q = _norm(here, q, "attn.q_norm", site="vision_query")
    k = _norm(here, k, "attn.k_norm", site="vision_key")
    q = here("vision.rope_axial", vision.rope_axial, q, grids=grids, theta=v.rope_theta, site="query")
    k = here("vision.rope_axial", vision.rope_axial, k, grids=grids, theta=v.rope_theta, site="key")
    o = here("vision.attention", vision.attention, q, k=k, v=value, offsets=ends, scale=v.head_dim**-0.5)
    x = here("residual.add", residual.add, x, y=project("vision.output", o.flatten(1), "attn.proj"), site="attention")
    h = here(
        "vision.gated_mlp",
        vision.gated_mlp,
        _norm(here, x, "norm2", site="norm1"),
        **{part: here.weight(f"mlp.{part}_proj") for part in ("gate", "up", "down")},
        **{f"{part}_bias": _bias(here, f"mlp.{part}_proj") for part in ("gate", "up", "down")},
        limit=v.limit,
    )
    return here("residual.add", residual.add, x, y=h, site="mlp")


def _merge(here: Here, x: Tensor) -> Tensor:
    norm = "post_projection_norm"
    x = here("vision.merger_project", linear, x, weight=here.weight("proj"))
    x = here(
        "vision.normed_gelu",
        vision.normed_gelu,
        x,
        weight=here.weight(norm),
        bias=here.tensor(f"{norm}.bias"),
        eps=MERGER_EPS,
    )
    parts = {part: here.weight(f"{part}_proj") for part in ("gate", "up", "down")}
    return here("vision.gated_mlp", vision.gated_mlp, x, **parts, limit=here.config.vision.limit, site="merger")
