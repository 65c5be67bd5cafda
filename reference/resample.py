"""Bicubic resizing as a formula, for implementations other than the one whose bytes the reference takes.

The cubic of Keys (1981) with a = -1/2; when an axis shrinks, its kernel is stretched by the same factor (antialiasing).
Each axis is one matrix of weights that sum to one. An implementation rounds to whole levels after the last axis, and
some after the first as well; which axis is first, and whether it cuts to 0 ... 255 in between, is its own affair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.rounding import Round, exact

A = -0.5
TOP = 255.0


def cubic(x: Tensor) -> Tensor:
    """The kernel at distances x, zero from 2 on."""
    x = x.abs()
    near = ((A + 2) * x - (A + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * A
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def axis_weights(before: int, after: int) -> Tensor:
    """float64 [after, before]: how much each place of an axis of length `before` gives to each of the resized one."""
    scale = before / after
    stretch = max(1.0, scale)
    center = (torch.arange(after, dtype=torch.float64) + 0.5) * scale
    first = (center - 2 * stretch + 0.5).floor().clamp(min=0)
    last = (center + 2 * stretch + 0.5).floor().clamp(max=before)  # places from first on and below last
    place = torch.arange(before, dtype=torch.float64)
    weight = cubic((place - center[:, None] + 0.5) / stretch)
    weight = torch.where((place >= first[:, None]) & (place < last[:, None]), weight, 0.0)
    return weight / weight.sum(1, keepdim=True)


def resized(
    levels: Tensor, *, height: int, width: int, rows_first: bool = False, cut: bool = False, round: Round = exact
) -> Tensor:
    """`levels` [h, w, channels] resized to [height, width, channels], float64, cut to 0 ... 255 at the end.

    Horizontal pass first, or with `rows_first` the vertical one; `cut`: also to 0 ... 255 between the two. Rounding
    points: "pass" between the axes, "level" at the end.
    """
    levels = levels.to(torch.float64)
    across = axis_weights(levels.shape[1], width).to(levels.device)
    down = axis_weights(levels.shape[0], height).to(levels.device)

    def between(x: Tensor) -> Tensor:
        return round("pass", x.clamp(0, TOP) if cut else x)

    if rows_first:
        y = torch.einsum("ow,hwc->hoc", across, between(torch.einsum("oh,hwc->owc", down, levels)))
    else:
        y = torch.einsum("oh,hwc->owc", down, between(torch.einsum("ow,hwc->hoc", across, levels)))
    return round("level", y.clamp(0, TOP))
