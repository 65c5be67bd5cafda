"""Exact rounding of wide values to the dtypes that a profile names: to nearest, or at random by distance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["nearest", "random"]


@dataclass(frozen=True)
class Format:
    """A binary format: bits of precision with the hidden one, exponent of the smallest normal value, largest value."""

    bits: int
    smallest_exponent: int
    largest: float
    saturates: bool = False  # beyond the largest value: stays there instead of becoming infinite


FORMATS: dict[str, Format] = {
    "bfloat16": Format(8, -126, float.fromhex("0x1.fep127")),
    "float16": Format(11, -14, 65504.0),
    "float32": Format(24, -126, float.fromhex("0x1.fffffep127")),
    "float8_e4m3fn": Format(4, -6, 448.0, saturates=True),
}


@dataclass(frozen=True)
class BlockFormat:
    """`element` codes with one scale for `block` neighbouring columns: amax / largest, or the least power of two that
    is no smaller."""

    element: str
    block: int
    powers_of_two: bool = False


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "float8_e4m3fn/128": BlockFormat("float8_e4m3fn", 128),
    "float8_e4m3fn/128/powers_of_two": BlockFormat("float8_e4m3fn", 128, powers_of_two=True),
}


LEVELS = "uint8"  # whole levels of a picture
WEIGHTS = ("s", "p")  # points where scores and weights of keys are rounded: those of equal keys are equal
_ODD = -7046029254386353131  # an odd multiplier that mixes 64 bits


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def ulp(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """Distance of neighbouring values of `dtype` at |x|, same shape and dtype as x (float64 or float32).

    Below the normal range it is the subnormal step. NaN and infinities give no meaningful value.
    """
    form = FORMATS[dtype]
    if x.dtype == torch.float64:
        power = (x.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    elif x.dtype == torch.float32:
        power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    else:
        raise TypeError(f"ulp needs float64 or float32 values, got {x.dtype}")
    smallest = max(2.0**form.smallest_exponent, torch.finfo(x.dtype).tiny)
    return power.clamp_(min=smallest).mul_(2.0 ** (1 - form.bits))


def round_nearest(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """x rounded to `dtype`, ties to even, kept in x's own dtype (float64 or float32)."""
    x = x.contiguous()
    step = ulp(x, dtype)
    return _in_range((x / step).round_().mul_(step), x, FORMATS[dtype])


def round_random(x: torch.Tensor, dtype: str, generator: torch.Generator | None = None) -> torch.Tensor:
    """x rounded to one of its two neighbours in `dtype`, with probabilities that make the mean x.

    The variance is f (1 - f) ulp^2 where f is x's place between the neighbours: ulp^2 / 6 on the average over f.
    """
    x = x.contiguous()
    step = ulp(x, dtype)
    uniform = torch.rand(x.shape, generator=generator, dtype=torch.float32, device=x.device)
    return _in_range((x / step).add_(uniform).floor_().mul_(step), x, FORMATS[dtype])


def round_alike(x: torch.Tensor, dtype: str, generator: torch.Generator | None = None) -> torch.Tensor:
    """`round_random` whose draws belong to values: what agrees in two bits more than `dtype` has is rounded alike.

    So does any rounding to nearest. The errors of equal weights (of equal keys) add up instead of averaging away.
    """
    x = x.contiguous()
    step = ulp(x, dtype)
    key, turn = torch.randint(2**62, (2,), generator=generator, device=x.device).unbind()
    mixed = (leading_bits(x, dtype) ^ key) * _ODD
    mixed = (mixed ^ (mixed >> 29) ^ turn) * _ODD
    uniform = ((mixed >> 32) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    return _in_range((x / step).add_(uniform).floor_().mul_(step), x, FORMATS[dtype])


def leading_bits(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """int64: sign, exponent and as many bits behind it as `dtype` has, and two more; x float64 or float32."""
    kept = FORMATS[dtype].bits - 1 + 2
    x = x.contiguous()
    if x.dtype == torch.float64:
        return x.view(torch.int64) >> max(0, 52 - kept)
    return x.view(torch.int32).to(torch.int64) >> max(0, 23 - kept)


def _in_range(rounded: torch.Tensor, x: torch.Tensor, form: Format) -> torch.Tensor:
    low, high = torch.aminmax(rounded) if rounded.numel() else (rounded, rounded)
    if rounded.numel() and -form.largest <= float(low) and float(high) <= form.largest:  # false for NaN
        return rounded
    beyond = rounded.abs() > form.largest
    limit = form.largest if form.saturates else float("inf")
    rounded = torch.where(beyond, torch.copysign(torch.full_like(rounded, limit), x), rounded)
    return torch.where(torch.isfinite(x), rounded, x)


def random_variance(x: torch.Tensor, dtype: str) -> torch.Tensor:
    """f (1 - f) ulp^2 of each element: the exact variance of `round_random`. Zero where x is a value of `dtype`."""
    x = x.contiguous()
    step = ulp(x, dtype)
    place = x / step
    place = place - place.floor()
    return (place * (1 - place)).mul_(step).mul_(step)


def round_blocks(
    x: torch.Tensor, name: str, mode: Mode = "nearest", generator: torch.Generator | None = None
) -> torch.Tensor:
    """x [..., width] float64 or float32 as its quantisation in the block format `name` decodes, same shape and dtype.

    Blocks are scaled by their own largest finite magnitude; blocks of zeros stay.
    """
    form = BLOCK_FORMATS[name]
    width = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -width % form.block)).unflatten(-1, (-1, form.block))
    amax = torch.nan_to_num(blocks, nan=0.0, posinf=0.0, neginf=0.0).abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, amax / FORMATS[form.element].largest, torch.ones_like(amax))
    if form.powers_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    scaled = (blocks / scale).contiguous()
    rounded = (
        round_nearest(scaled, form.element) if mode == "nearest" else round_random(scaled, form.element, generator)
    )
    return (rounded * scale).flatten(-2)[..., :width]


def round_levels(x: torch.Tensor, mode: Mode = "nearest", generator: torch.Generator | None = None) -> torch.Tensor:
    """x rounded to whole levels from 0 to 255, ties up or at random by distance; in x's own dtype."""
    if mode == "nearest":
        return (x + 0.5).floor_().clamp_(0, 255)
    return (x + torch.rand(x.shape, generator=generator, dtype=torch.float32, device=x.device)).floor_().clamp_(0, 255)


class Rounder:
    """The `round=` argument of a reference function: rounds at the points that `points` names, nowhere else.

    points: point -> name of a dtype or of a block format. `leave`: points left alone whatever `points` says; what
    models the output's rounding itself leaves "out". Random mode draws from `generator`, on the device of the values.
    Values keep their dtype; those of a dtype no wider than the point's are returned as they are.
    """

    def __init__(
        self,
        points: Mapping[str, str],
        mode: Mode = "nearest",
        generator: torch.Generator | None = None,
        *,
        leave: tuple[str, ...] = (),
    ) -> None:
        self.points = {point: dtype for point, dtype in points.items() if point not in leave}
        self.mode, self.generator = mode, generator

    def __call__(self, point: str, value: torch.Tensor) -> torch.Tensor:
        dtype = self.points.get(point)
        if dtype is None or value.dtype not in (torch.float64, torch.float32) or dtype_name(value.dtype) == dtype:
            return value
        if dtype == LEVELS:
            return round_levels(value, self.mode, self.generator)
        if dtype in BLOCK_FORMATS:
            return round_blocks(value, dtype, self.mode, self.generator)
        if self.mode == "nearest":
            return round_nearest(value, dtype)
        return (round_alike if point in WEIGHTS else round_random)(value, dtype, self.generator)
