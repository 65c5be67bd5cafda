"""Images on their way to the tower: read from files, measured in patches, and laid over the media pads of a turn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from day0check.accelerated.ops.vision import budget_size, grid_of
from day0check.errors import InputError
from day0check.probe.rows import RowMap
from reference.config import Vision as VisionConfig

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
    grids = tuple(grid_in_patches(image.shape[1], image.shape[0], config) for image in images)
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


def grid_in_patches(width: int, height: int, config: VisionConfig) -> tuple[int, int, int]:
    """(1, rows, columns) in patches of an image of width x height pixels, by the rules of its tower."""
    if config.kind == "glm":
        budget = {"min_tokens": config.min_tokens, "max_tokens": config.max_tokens}
        return budget_size(width, height, patch=config.patch, merge=config.merge, **budget)[1]
    limits = (config.patch_limit, config.side_limit)
    return grid_of(width, height, patch=config.patch, merge=config.merge, limits=limits)
