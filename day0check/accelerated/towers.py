"""The vision towers: from pictures to features [tokens, D], every operator through the recorder. Patches are rows."""

from __future__ import annotations

import torch
from torch import Tensor

from day0check.accelerated.tower_weights import Affine, Gated, GlmBlock, GlmTower, MoonBlock, MoonVit
from day0check.accelerated.vision import Pictures
from day0check.probe.recorder import Caller, Here
from day0check.probe.rows import RowMap
from reference.config import Vision as VisionConfig

MERGER_EPS = 1e-5  # of the LayerNorm in the merger of GLM-5.3, which its configuration does not name
Grids = tuple[tuple[int, int, int], ...]


def features(
    caller: Caller, pictures: Pictures, weights: MoonVit | GlmTower, config: VisionConfig, dtype: torch.dtype
) -> Tensor:
    """Features [tokens, D] in `dtype` of all images of a turn, in their order."""
    tower = _glm if isinstance(weights, GlmTower) else _moonvit
    return tower(caller, pictures, weights, config, dtype)


def _pixels(at: Here, pictures: Pictures, config: VisionConfig) -> Tensor:
    """Preprocessed patches of all images, float32 [patches, 3*patch*patch]."""
    if config.kind == "glm":
        operator, limits = "image.preprocess_in_budget", ("min_tokens", "max_tokens")
    else:
        operator, limits = "image.preprocess", ("patch_limit", "side_limit")
    settings = {name: getattr(config, name) for name in ("patch", "merge", *limits)}
    found = []
    for image, rows in zip(pictures.images, pictures.patches, strict=True):
        pixels, _ = at(operator, image, row_map=rows, **settings, mean=config.image_mean, std=config.image_std)
        found.append(pixels)
    return torch.cat(found)


def _ends(grids: Grids, device: torch.device) -> Tensor:
    """int64 [images + 1]: where the patches of each image begin, and where the last ones end."""
    return torch.cumsum(torch.tensor([0, *(t * h * w for t, h, w in grids)], device=device), 0)


def _norm(at: Here, x: Tensor, p: Affine, *, site: str, rows: RowMap, eps: float) -> Tensor:
    """RMSNorm, or LayerNorm where there is a bias."""
    if p.bias is None:
        return at("norm.rms", x, site=site, row_map=rows, weight=p.weight, eps=eps)
    return at("norm.layer", x, site=site, row_map=rows, weight=p.weight, bias=p.bias, eps=eps)


def _linear(at: Here, operator: str, x: Tensor, p: Affine, rows: RowMap) -> Tensor:
    return at(operator, x, row_map=rows, weight=p.weight, bias=p.bias)


# ------------------------------------------------------------------------------------------------------- MoonViT


def _moonvit(caller: Caller, pictures: Pictures, p: MoonVit, config: VisionConfig, dtype: torch.dtype) -> Tensor:
    rows, grids, at = RowMap.concatenate(pictures.patches), pictures.grids, caller.at("vision")
    x = _linear(at, "vision.patch", _pixels(at, pictures, config).to(dtype), p.patch, rows)
    x = at("vision.position", x, row_map=rows, table=p.table, grids=grids, mode=config.interpolation)
    offsets = _ends(grids, x.device)
    for number, block in enumerate(p.blocks):
        x = _moon_block(caller.at(f"vision.blocks.{number:02d}"), x, block, config, rows, grids, offsets)
    x = _norm(at, x, p.final_norm, site="vision_final", rows=rows, eps=config.eps)
    x = at("vision.merge", x, row_map=rows, grids=grids, merge=config.merge)
    return _project(at, x, p, config, pictures.tokens)


def _moon_block(
    at: Here, x: Tensor, p: MoonBlock, config: VisionConfig, rows: RowMap, grids: Grids, offsets: Tensor
) -> Tensor:
    h = _norm(at, x, p.norm0, site="norm0", rows=rows, eps=config.eps)
    qkv = _linear(at, "vision.qkv", h, p.qkv, rows)
    q, k, v = qkv.view(x.shape[0], 3, config.heads, config.head_dim).unbind(1)
    q = at("vision.rope", q, site="query", row_map=rows, grids=grids, theta=config.rope_theta)
    k = at("vision.rope", k, site="key", row_map=rows, grids=grids, theta=config.rope_theta)
    y = at("vision.attention", q, row_map=rows, k=k, v=v, offsets=offsets, scale=config.head_dim**-0.5)
    y = _linear(at, "vision.output", y.flatten(1), p.output, rows)
    x = at("residual.add", x, site="attention", row_map=rows, y=y)
    h = _norm(at, x, p.norm1, site="norm1", rows=rows, eps=config.eps)
    biases = {"bias0": p.fc0.bias, "bias1": p.fc1.bias}
    y = at("vision.mlp", h, row_map=rows, fc0=p.fc0.weight, fc1=p.fc1.weight, **biases)
    return at("residual.add", x, site="mlp", row_map=rows, y=y)


def _project(at: Here, x: Tensor, p: MoonVit, config: VisionConfig, rows: RowMap) -> Tensor:
    """Merged patches [tokens, merge*merge*Dv] into the text: a norm of each patch in front, or one of the result."""
    weights = {"w0": p.project0.weight, "w1": p.project1.weight}
    if p.before is None:
        norm = {"norm_weight": p.behind.weight, "eps": config.projector_eps}
        return at("vision.project", x, row_map=rows, **weights, **norm)
    patches = x.view(x.shape[0], -1, config.hidden)
    x = _norm(at, patches, p.before, site="projector", rows=rows, eps=config.projector_eps).flatten(1)
    return at("vision.project_plain", x, row_map=rows, **weights, bias0=p.project0.bias, bias1=p.project1.bias)


# ------------------------------------------------------------------------------------------------------- GLM-5.3


def _glm(caller: Caller, pictures: Pictures, p: GlmTower, config: VisionConfig, dtype: torch.dtype) -> Tensor:
    rows, grids, at = RowMap.concatenate(pictures.patches), pictures.grids, caller.at("vision")
    x = _linear(at, "vision.patch", _pixels(at, pictures, config).to(dtype), p.patch, rows)
    offsets = _ends(grids, x.device)
    for number, block in enumerate(p.blocks):
        x = _glm_block(caller.at(f"vision.blocks.{number:02d}"), x, block, config, rows, grids, offsets)
    x = _norm(at, x, p.final_norm, site="vision_final", rows=rows, eps=config.eps)
    x = at("vision.merge", x, row_map=rows, grids=grids, merge=config.merge)
    tokens = pictures.tokens
    x = _linear(at, "vision.downsample", x, p.downsample, tokens)
    x = _linear(at, "vision.merger_project", x, p.project, tokens)
    norm = {"weight": p.project_norm.weight, "bias": p.project_norm.bias, "eps": MERGER_EPS}
    x = at("vision.normed_gelu", x, row_map=tokens, **norm)
    return _gated(at, x, p.mlp, config, tokens, site="merger")


def _glm_block(
    at: Here, x: Tensor, p: GlmBlock, config: VisionConfig, rows: RowMap, grids: Grids, offsets: Tensor
) -> Tensor:
    h = _norm(at, x, p.norm0, site="norm0", rows=rows, eps=config.eps)
    qkv = _linear(at, "vision.qkv", h, p.qkv, rows)
    q, k, v = qkv.view(x.shape[0], 3, config.heads, config.head_dim).unbind(1)
    q = _norm(at, q, p.query_norm, site="vision_query", rows=rows, eps=config.eps)
    k = _norm(at, k, p.key_norm, site="vision_key", rows=rows, eps=config.eps)
    q = at("vision.rope_axial", q, site="query", row_map=rows, grids=grids, theta=config.rope_theta)
    k = at("vision.rope_axial", k, site="key", row_map=rows, grids=grids, theta=config.rope_theta)
    y = at("vision.attention", q, row_map=rows, k=k, v=v, offsets=offsets, scale=config.head_dim**-0.5)
    y = _linear(at, "vision.output", y.flatten(1), p.output, rows)
    x = at("residual.add", x, site="attention", row_map=rows, y=y)
    h = _norm(at, x, p.norm1, site="norm1", rows=rows, eps=config.eps)
    return at("residual.add", x, site="mlp", row_map=rows, y=_gated(at, h, p.mlp, config, rows))


def _gated(at: Here, x: Tensor, p: Gated, config: VisionConfig, rows: RowMap, *, site: str = "") -> Tensor:
    weights = {part: getattr(p, part).weight for part in ("gate", "up", "down")}
    biases = {f"{part}_bias": getattr(p, part).bias for part in weights}
    return at("vision.gated_mlp", x, site=site, row_map=rows, **weights, **biases, limit=config.limit)
