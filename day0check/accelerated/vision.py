"""Images on their way into the text: reading, preprocessing, the tower and the projector, through the same recorder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from day0check.accelerated.ops.vision import grid_of
from day0check.accelerated.weights import Vision
from day0check.errors import InputError
from day0check.probe.recorder import Caller, Here
from day0check.probe.rows import RowMap
from reference.config import Vision as VisionConfig

ROPE_THETA = 10000.0
KEPT_MODES = ("L", "LA", "RGB", "RGBA")


def read_image(path: str) -> Tensor:
    """The picture at `path` as uint8 [height, width, channels] in its own mode, others as RGB or RGBA.

    Raises InputError when there is no such file or it is no picture.
    """
    try:
        with Image.open(path) as picture:
            picture.load()
            if picture.mode not in KEPT_MODES:
                transparent = "transparency" in picture.info or picture.mode in ("PA", "La", "RGBa")
                picture = picture.convert("RGBA" if transparent else "RGB")
            pixels = np.array(picture)
    except OSError as error:
        raise InputError(
            f"cannot be read as an image: {error}", where=str(Path(path)), todo="give a picture"
        ) from error
    return torch.from_numpy(pixels if pixels.ndim == 3 else pixels[..., None])


@dataclass(frozen=True)
class Pictures:
    """The images of one turn and where they go: `grids` in patches, row maps of the patches and of their tokens."""

    images: tuple[Tensor, ...]
    grids: tuple[tuple[int, int, int], ...]
    patches: tuple[RowMap, ...]  # one map an image
    tokens: RowMap


def place(images: list[Tensor], config: VisionConfig, request: str, pads: list[int]) -> Pictures:
    """Assigns the media pads of a turn, at positions `pads` of the sequence of `request`, to its `images` in order.

    Raises InputError when the images do not fill the pads exactly.
    """
    limits = (config.patch_limit, config.side_limit)
    grids = tuple(
        grid_of(image.shape[1], image.shape[0], patch=config.patch, merge=config.merge, limits=limits)
        for image in images
    )
    counts = [height * width // config.merge**2 for _, height, width in grids]
    if sum(counts) != len(pads):
        raise InputError(
            f"{len(images)} image(s) fill {sum(counts)} media pads, the turn has {len(pads)}",
            where=request,
            todo="write one media pad for each merged patch of the padded image",
        )
    maps, first = [], 0
    for (_, height, width), count in zip(grids, counts, strict=True):
        groups = width // config.merge
        at = [pads[first + r // config.merge * groups + c // config.merge] for r in range(height) for c in range(width)]
        maps.append(RowMap((request,), (0,) * len(at), tuple(at)))
        first += count
    return Pictures(tuple(images), grids, tuple(maps), RowMap((request,), (0,) * len(pads), tuple(pads)))


def _pixels(at: Here, pictures: Pictures, config: VisionConfig) -> Tensor:
    """Preprocessed patches of all images, float32 [patches, 3*patch*patch]."""
    found = []
    for image, rows in zip(pictures.images, pictures.patches, strict=True):
        pixels, _ = at(
            "image.preprocess",
            image,
            row_map=rows,
            patch=config.patch,
            merge=config.merge,
            patch_limit=config.patch_limit,
            side_limit=config.side_limit,
            mean=config.image_mean,
            std=config.image_std,
        )
        found.append(pixels)
    return torch.cat(found)


def tower(caller: Caller, pictures: Pictures, weights: Vision, config: VisionConfig, dtype: torch.dtype) -> Tensor:
    """Features [tokens, D] of all images of a turn: patches, positions, blocks, merger and projector."""
    rows, grids, at = RowMap.concatenate(pictures.patches), pictures.grids, caller.at("vision")
    x = at("vision.patch", _pixels(at, pictures, config).to(dtype), row_map=rows, weight=weights.patch)
    x = at("vision.position", x, row_map=rows, table=weights.table, grids=grids, mode=config.interpolation)
    sizes = torch.tensor([0, *(t * h * w for t, h, w in grids)], device=x.device)
    offsets = torch.cumsum(sizes, 0)
    for number, block in enumerate(weights.blocks):
        here = caller.at(f"vision.blocks.{number:02d}")
        h = here("norm.rms", x, site="norm0", row_map=rows, weight=block.norm0, eps=config.eps)
        qkv = here("vision.qkv", h, row_map=rows, weight=block.qkv)
        q, k, v = qkv.view(x.shape[0], 3, config.heads, config.head_dim).unbind(1)
        q = here("vision.rope", q, site="query", row_map=rows, grids=grids, theta=ROPE_THETA)
        k = here("vision.rope", k, site="key", row_map=rows, grids=grids, theta=ROPE_THETA)
        y = here("vision.attention", q, row_map=rows, k=k, v=v, offsets=offsets, scale=config.head_dim**-0.5)
        y = here("vision.output", y.flatten(1), row_map=rows, weight=block.output)
        x = here("residual.add", x, site="attention", row_map=rows, y=y)
        h = here("norm.rms", x, site="norm1", row_map=rows, weight=block.norm1, eps=config.eps)
        y = here("vision.mlp", h, row_map=rows, fc0=block.fc0, fc1=block.fc1)
        x = here("residual.add", x, site="mlp", row_map=rows, y=y)
    x = at("norm.rms", x, site="vision_final", row_map=rows, weight=weights.final_norm, eps=config.eps)
    x = at("vision.merge", x, row_map=rows, grids=grids, merge=config.merge)
    return at(
        "vision.project",
        x,
        row_map=pictures.tokens,
        w0=weights.w0,
        w1=weights.w1,
        norm_weight=weights.norm,
        eps=config.projector_eps,
    )
