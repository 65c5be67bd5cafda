"""Pixels that another implementation of the claimed resampler made: legal levels, not the reference's bytes.

A legal implementation of the rule rounds to whole levels once or after each axis, begins with either axis, and cuts to
0 ... 255 in between or only at the end. So each level lies within roundings of what the exact formula gives in one of
these ways; over an image the roundings have no mean and the variance of their number. Pixels that are not resampled
(padding, images that keep their size) have one value. Images whose alpha is resized with them are not judged here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from day0check.compare.judgement import Judgement, beyond
from day0check.compare.replay import Replay
from reference.image_grid import ImageGrid, grid_in_budget, grid_within
from reference.resample import axis_weights, resized
from reference.rounding import Round, exact

PLAIN, IN_BUDGET = "image.preprocess", "image.preprocess_in_budget"
OPERATORS = (PLAIN, IN_BUDGET)
RULE = "bicubic-antialias"
WEIGHTS = 0.1  # levels: weights of 15 bits or more, times up to a few hundred levels at a dozen places
UNTOUCHED = 0.02  # levels: a byte through float32 normalisation and back
WHOLE, MEAN = 1.1, 0.1  # ratio of the error to that of legal roundings; mean error in levels
_LEAST = 1024  # elements whose mean square says something


def grid_of(operator: str, image: torch.Tensor, settings: dict[str, Any]) -> ImageGrid:
    """The grid of a call of `operator` on `image` [height, width, channels]."""
    names = ("min_tokens", "max_tokens") if operator == IN_BUDGET else ("patch_limit", "side_limit")
    limits = {name: settings[name] for name in ("patch", "merge", *names)}
    of = grid_in_budget if operator == IN_BUDGET else grid_within
    return of(image.shape[1], image.shape[0], **limits)


def plain_levels(operator: str, image: torch.Tensor) -> torch.Tensor | None:
    """float64 [height, width, 3] of an image; None where alpha is resized, too (GLM's rule drops it before)."""
    channels = image.shape[2]
    if channels in (2, 4) and operator == PLAIN:
        return None
    colours = image[:, :, :3] if channels >= 3 else image[:, :, :1].expand(-1, -1, 3)
    return colours.to(torch.float64)


def preprocessed(
    function: Callable[..., Any], operator: str, image: torch.Tensor, *, round: Round = exact, **settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `operator` gives by the exact formula: pixels float64 and grid, rounded at "pass" and "level".

    `function`: the operator of the reference, which images with alpha and those that keep their size are left to.
    """
    grid, levels = grid_of(operator, image, settings), plain_levels(operator, image)
    if levels is None or levels.shape[:2] == (grid.height, grid.width):
        return function(image, **settings)
    made = resized(levels, height=grid.height, width=grid.width, round=round)
    canvas = _canvas(made, grid, settings["patch"])
    shift, spread = (torch.tensor(settings[n], dtype=torch.float64, device=image.device) for n in ("mean", "std"))
    pixels = patches((canvas / 255 - shift) / spread, grid, settings["patch"])
    return pixels, torch.tensor([1, grid.rows, grid.columns], device=image.device)


def patches(canvas: torch.Tensor, grid: ImageGrid, patch: int) -> torch.Tensor:
    """[rows * patch, columns * patch, 3] as [rows * columns, 3 * patch * patch], channel first in each patch."""
    cut = canvas.reshape(grid.rows, patch, grid.columns, patch, 3).permute(0, 2, 4, 1, 3)
    return cut.reshape(grid.rows * grid.columns, 3 * patch * patch)


def _canvas(content: torch.Tensor, grid: ImageGrid, patch: int) -> torch.Tensor:
    canvas = content.new_zeros(grid.rows * patch, grid.columns * patch, content.shape[2])
    canvas[: grid.height, : grid.width] = content
    return canvas


@dataclass(frozen=True)
class _Legal:
    """Levels [P, 3 * patch^2] between which the exact formula lies, how far roundings reach beyond them, and their
    standard deviation."""

    low: torch.Tensor
    high: torch.Tensor
    reach: torch.Tensor
    deviation: torch.Tensor


def judge_resampled(replay: Replay, results: tuple[torch.Tensor, ...]) -> list[Judgement] | None:
    """Judgements of pixels and grid; None for an image whose bytes another implementation must give, too."""
    name, arguments = replay.contract.name, dict(replay.arguments)
    image = arguments.pop("image")
    grid, levels = grid_of(name, image, arguments), plain_levels(name, image)
    if levels is None or levels.shape[:2] == (grid.height, grid.width) or len(results) != 2:
        return None
    pixels, found = results
    due = [1, grid.rows, grid.columns]
    if found.tolist() != due or pixels.shape != (grid.rows * grid.columns, 3 * arguments["patch"] ** 2):
        return None
    legal = _legal(levels, grid, arguments["patch"])
    shift, spread = (_per_channel(arguments[n], arguments["patch"], pixels.device) for n in ("mean", "std"))
    own = (pixels.to(torch.float64) * spread + shift) * 255
    same = Judgement(3, 3, {"wrong_integers": 0.0}, {"wrong_integers": 0.0}, axis="")
    return [_judged(own, legal), same]


def _per_channel(values: Any, patch: int, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device).repeat_interleave(patch * patch)


def _legal(levels: torch.Tensor, grid: ImageGrid, patch: int) -> _Legal:
    size = {"height": grid.height, "width": grid.width}
    ways = [resized(levels, **size), *(resized(levels, **size, rows_first=f, cut=True) for f in (False, True))]
    down, across = axis_weights(levels.shape[0], grid.height), axis_weights(levels.shape[1], grid.width)
    passed_on = torch.maximum(down.abs().sum(1)[:, None], across.abs().sum(1)[None])[..., None].to(levels.device)
    squares = torch.maximum(down.square().sum(1)[:, None], across.square().sum(1)[None])[..., None].to(levels.device)
    reach = (0.5 + 0.5 * passed_on + WEIGHTS).expand(-1, -1, 3)
    deviation = ((1 + squares) / 12).sqrt().expand(-1, -1, 3)

    def laid(x: torch.Tensor) -> torch.Tensor:
        return patches(_canvas(x, grid, patch), grid, patch)

    low, high = torch.stack(ways).amin(0), torch.stack(ways).amax(0)
    return _Legal(laid(low), laid(high), laid(reach).clamp(min=UNTOUCHED), laid(deviation))


def _judged(own: torch.Tensor, legal: _Legal) -> Judgement:
    error = own - own.clamp(min=legal.low, max=legal.high)
    share = (error.abs() / legal.reach).nan_to_num(torch.inf, torch.inf, torch.inf)
    rounded = legal.deviation > 0
    statistics = {"levels": float(share.max())}
    limits = {"levels": 1.0}
    if int(rounded.sum()) >= _LEAST:
        statistics["whole"] = float((error / legal.deviation)[rounded].square().mean().sqrt())
        statistics["mean"] = float(error[rounded].mean().abs())
        limits |= {"whole": WHOLE, "mean": MEAN}
    failing = beyond(statistics, limits)
    row = int(share.amax(1).argmax())
    reached = float(error.abs().max())
    bad = (share.amax(1) > 1).nonzero().flatten()
    words = (
        f"{reached:.3g} levels off what {RULE} gives, where legal roundings reach {float(legal.reach[row].max()):.2g}"
    )
    if failing in ("whole", "mean"):
        words = f"levels are rounded otherwise than to nearest: {failing} {statistics[failing]:.3g} over all pixels"
    return Judgement(
        len(own),
        own.numel(),
        statistics,
        limits,
        failing,
        row=row if failing else None,
        axis="patches",
        pattern="another resampler" if failing else "",
        message=words if failing else "",
        power=float(legal.reach.max()) / 255,
        bad=tuple(int(n) for n in bad[:4096]),
        sizes=tuple(float(x) for x in share.amax(1)[bad[:4096]]),
    )
