"""An image brought to its size before `image.preprocess` sees it, which then resizes nothing: another resampler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from day0check.accelerated.ops.vision import shrunk_size

PROFILE = str(Path(__file__).with_name("another_resampler.toml"))  # claims the bicubic rule by any implementation


def resized(
    image: torch.Tensor,
    mode: str,
    limits: dict[str, Any],
    *,
    to_levels: Callable[[torch.Tensor], torch.Tensor] = torch.round,
) -> torch.Tensor:
    """`image` uint8 [h, w, c] in the size that `limits` (patch, merge, patch_limit, side_limit) give it, by torch's
    antialiased interpolation in float32: levels are made whole once, by `to_levels`. An image with alpha stays."""
    if image.shape[2] in (2, 4):
        return image
    at = limits["patch"], limits["patch_limit"], limits["side_limit"]
    width, height = shrunk_size(image.shape[1], image.shape[0], *at)
    x = image.permute(2, 0, 1)[None].float()
    y = torch.nn.functional.interpolate(x, size=(height, width), mode=mode, antialias=True)
    return to_levels(y[0].permute(1, 2, 0).clamp(0, 255)).to(torch.uint8)
