"""How large an image becomes: patches and tokens from its width and height. Standard library only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from reference.config import Vision


@dataclass(frozen=True)
class ImageGrid:
    """`width` and `height` in pixels after resizing; `rows` and `columns` in patches after padding."""

    width: int
    height: int
    rows: int
    columns: int
    tokens: int


def image_grid(width: int, height: int, vision: Vision) -> ImageGrid:
    """Size of an image of width x height pixels after resizing, padding and merging (model.md 2.9).

    Images only ever shrink, and each axis is cut to whole pixels by itself; padding to whole merge groups comes after
    the limits, so the padded image may exceed them. Raises ValueError for an empty image.
    """
    return grid_within(
        width,
        height,
        patch=vision.patch,
        merge=vision.merge,
        patch_limit=vision.patch_limit,
        side_limit=vision.side_limit,
    )


def grid_within(width: int, height: int, *, patch: int, merge: int, patch_limit: int, side_limit: int) -> ImageGrid:
    """As `image_grid`, the limits given one by one."""
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width}x{height} pixels is empty")
    side = side_limit * patch
    patches = max(1, width // patch) * max(1, height // patch)
    scale = min(1.0, math.sqrt(patch_limit / patches), side / width, side / height)
    new_width, new_height = (min(max(1, int(length * scale)), side) for length in (width, height))
    group = patch * merge
    groups_across, groups_down = -(-new_width // group), -(-new_height // group)
    return ImageGrid(
        width=new_width,
        height=new_height,
        rows=groups_down * merge,
        columns=groups_across * merge,
        tokens=groups_across * groups_down,
    )
