"""How large an image becomes: patches and tokens from its width and height. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Callable
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

    GLM towers: see `grid_in_budget`. In MoonViT images only ever shrink, and each axis is cut to whole pixels by
    itself; padding to whole merge groups comes after the limits, so the padded image may exceed them. Raises
    ValueError for an empty image.
    """
    if vision.kind == "glm":
        return grid_in_budget(
            width,
            height,
            patch=vision.patch,
            merge=vision.merge,
            min_tokens=vision.min_tokens,
            max_tokens=vision.max_tokens,
        )
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


def grid_in_budget(width: int, height: int, *, patch: int, merge: int, min_tokens: int, max_tokens: int) -> ImageGrid:
    """Size of an image that must become min_tokens to max_tokens tokens (GLM-5.3's processor).

    The canvas is the image rounded up to whole merge groups; one with too few tokens is that of the image enlarged to
    the area of min_tokens, one with too many that of the tallest shrunk image that fits. The content keeps its aspect
    and is enlarged only when its own area is below min_tokens; the rest of the canvas is padding. Raises ValueError
    for an empty image or a budget without a token.
    """
    if width < 1 or height < 1:
        raise ValueError(f"an image of {width}x{height} pixels is empty")
    if max_tokens < 1:
        raise ValueError("a budget of no tokens")
    side = patch * merge

    def groups(across: int, down: int) -> tuple[int, int]:
        return -(-across // side), -(-down // side)

    canvas = groups(width, height)
    if canvas[0] * canvas[1] < min_tokens:
        scale = math.sqrt(min_tokens * side**2 / (height * width))
        canvas = groups(max(1, math.ceil(width * scale)), max(1, math.ceil(height * scale)))
    if canvas[0] * canvas[1] > max_tokens:
        canvas = _tallest_fit(width, height, groups, max_tokens)
    scale = min(canvas[1] * side / height, canvas[0] * side / width)
    if height * width >= min_tokens * side**2:
        scale = min(1.0, scale)
    new_width, new_height = (
        max(1, min(count * side, math.floor(length * scale)))
        for count, length in zip(canvas, (width, height), strict=True)
    )
    return ImageGrid(new_width, new_height, canvas[1] * merge, canvas[0] * merge, canvas[0] * canvas[1])


def _tallest_fit(
    width: int, height: int, groups: Callable[[int, int], tuple[int, int]], max_tokens: int
) -> tuple[int, int]:
    """Groups across and down of the image shrunk to the largest height whose tokens fit, found by halving."""
    low, high, best = 1, height, (1, 1)
    while low <= high:
        middle = (low + high) // 2
        canvas = groups(max(1, math.floor(width * middle / height)), middle)
        if canvas[0] * canvas[1] <= max_tokens:
            best, low = canvas, middle + 1
        else:
            high = middle - 1
    return best
