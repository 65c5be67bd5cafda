"""An image brought to its size before `image.preprocess` sees it, which then resizes nothing: another resampler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from reference.image_grid import grid_within

PROFILE = str(Path(__file__).with_name("another_resampler.toml"))  # claims the bicubic rule by any implementation


def resized(image: torch.Tensor, mode: str, limits: dict[str, Any]) -> torch.Tensor:
    """`image` uint8 [h, w, c] in the size that `limits` (patch, merge, patch_limit, side_limit) give it, by torch's
    antialiased interpolation in float32: levels are rounded once. An image with alpha stays."""
    if image.shape[2] in (2, 4):
        return image
    grid = grid_within(image.shape[1], image.shape[0], **limits)
    x = image.permute(2, 0, 1)[None].float()
    y = torch.nn.functional.interpolate(x, size=(grid.height, grid.width), mode=mode, antialias=True)
    return y[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8)
