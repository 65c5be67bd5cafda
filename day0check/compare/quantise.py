"""The legality of quantised values: never our codes, always the rule of the format at the candidate's own scale.

|code * scale - x| is at most half a step of the format, nothing that the format holds is saturated or NaN, and the
scales follow one stated formula. Legal variants (divide or multiply by the reciprocal, half up, a scale rounded to
bfloat16, powers of two) differ in their codes, never in this. Source: method notes, section 3.
"""

from __future__ import annotations

import torch

from day0check.compare.exact import compare_bytes
from day0check.compare.judgement import Judgement
from day0check.compare.rounding import FORMATS, ulp

BLOCK = 128  # columns that share a scale
HALF_STEP = 0.5 + 2.0**-10  # in steps: half, and what a division in float32 adds
FORMULA = 2.0**-8  # relative: a scale may have been rounded to bfloat16
LEAST_AMAX = 1e-4  # blocks below it may be scaled as if they reached it (a guard against division by zero)
ELEMENT = "float8_e4m3fn"
SPREADS = 4.0  # of the slope of a block, in what rounding to nearest gives it


def judge_quantiser(x: torch.Tensor, results: tuple[torch.Tensor, ...], *, block: int = BLOCK) -> list[Judgement]:
    """One judgement of codes [rows, width] and scales [rows, ceil(width/block)] of x [rows, width].

    The address is the lowest illegal row. A scale that does not belong to its codes is told with its factor: the slope
    of the decoded block on x.
    """
    if len(results) != 2:
        return [_refused("results", f"{len(results)} results where codes and scales are due")]
    codes, scale = results
    blocks = -(-x.shape[1] // block)
    if codes.dtype != torch.float8_e4m3fn or scale.dtype != torch.float32:
        due = f"{ELEMENT} codes and float32 scales are due"
        return [_refused("dtype", f"{codes.dtype} and {scale.dtype} where {due}")]
    if codes.shape != x.shape or tuple(scale.shape) != (x.shape[0], blocks):
        return [
            compare_bytes(scale, scale.new_empty(x.shape[0], blocks)),
            compare_bytes(codes, codes.new_empty(x.shape)),
        ]
    wide, code, own = _in_blocks(x, block), _in_blocks(codes, block), scale.double()
    usable = torch.isfinite(wide).all(-1)  # what became of NaN and infinity is told where they began
    wide = torch.where(usable[..., None], wide, 0.0)
    amax = wide.abs().amax(-1)
    steps = torch.where(usable[..., None], half_steps(wide, code, own), 0.0)
    off, rule = _off_formula(amax, own)
    worst = float(steps.max()) if steps.numel() else 0.0
    statistics = {"half_steps": worst, "scale": float(off.max()) if off.numel() else 0.0}
    limits = {"half_steps": HALF_STEP, "scale": FORMULA}
    rows, elements = int(x.shape[0]), int(x.numel())
    bad = (steps > HALF_STEP).any(-1)  # [rows, blocks]
    if bool(bad.any()):
        pattern, message = _in_words(bad, steps, wide, code, own)
        row = int(bad.any(-1).nonzero()[0])
        return [Judgement(rows, elements, statistics, limits, "half_steps", row, pattern=pattern, message=message)]
    wrong = off > FORMULA
    if bool(wrong.any()):
        row, at = (int(i) for i in wrong.nonzero()[0])
        first = f"the first, of row {row}, is {float(own[row, at]):.4g} for an amax of {float(amax[row, at]):.4g}"
        message = (
            f"{int(wrong.sum())} of {wrong.numel()} scales are neither amax/448 nor the least power of two that holds "
            f"their block; {first}"
        )
        return [Judgement(rows, elements, statistics, limits, "scale", row, pattern="wrong scale", message=message)]
    return [Judgement(rows, elements, statistics, limits, message=rule)]


def judge_calibrated(x: torch.Tensor, results: tuple[torch.Tensor, ...], scale: torch.Tensor) -> list[Judgement]:
    """One judgement of codes [rows, width] of x [rows, width] at a `scale` [1] that calibration gave: each the nearest,
    and saturated where x lies beyond 448 scales. The scale itself is compared with the checkpoint's elsewhere."""
    if len(results) != 1 or results[0].shape != x.shape or results[0].dtype != torch.float8_e4m3fn:
        return [_refused("results", f"codes in {ELEMENT} of the shape of the rows are due, and nothing else")]
    wide, own = x.to(torch.float64), scale.double().reshape(()).expand(x.shape[0])
    usable = torch.isfinite(wide)
    reach = FORMATS[ELEMENT].largest * own[:, None]
    inside = torch.where(usable, wide, 0.0).clamp(-reach, reach)
    steps = torch.where(usable, half_steps(inside, results[0].to(torch.float64), own), 0.0)
    worst = float(steps.max()) if steps.numel() else 0.0
    statistics, limits = {"half_steps": worst}, {"half_steps": HALF_STEP}
    bad = (steps > HALF_STEP).any(-1)
    if not bool(bad.any()):
        return [Judgement(int(x.shape[0]), int(x.numel()), statistics, limits)]
    message = f"{int(bad.sum())} of {len(bad)} rows hold codes that are not the nearest at the scale of the call"
    row = int(bad.nonzero()[0])
    counts = int(x.shape[0]), int(x.numel())
    return [Judgement(*counts, statistics, limits, "half_steps", row, pattern="wrong code", message=message)]


def half_steps(x: torch.Tensor, code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """|code * scale - x| in steps of E4M3 at x / scale: x and code [..., block], scale [...], float64, x finite.

    Infinite where a code or its scale is no number, or a scale not positive.
    """
    target = x / scale.unsqueeze(-1)
    largest = FORMATS[ELEMENT].largest
    inside = torch.nan_to_num(target, nan=0.0, posinf=0.0, neginf=0.0).clamp(-largest, largest)
    steps = (code - target).abs() / ulp(inside.contiguous(), ELEMENT)
    unusable = ~(torch.isfinite(scale) & (scale > 0)).unsqueeze(-1)
    return torch.where(unusable | torch.isnan(steps), torch.inf, steps)


def _in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """[rows, blocks, block] float64, the last block filled with zeros."""
    wide = x.to(torch.float64)
    return torch.nn.functional.pad(wide, (0, -wide.shape[1] % block)).unflatten(1, (-1, block))


def _off_formula(amax: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, str]:
    """([rows, blocks] relative distance of each scale from the formula that fits them all best, its name).

    Blocks of zeros may have any scale; blocks that hold less than LEAST_AMAX may be scaled as if they held it.
    """
    largest = FORMATS[ELEMENT].largest
    due = amax / largest
    floor = torch.maximum(amax, torch.full_like(amax, LEAST_AMAX)) / largest
    by_value = torch.minimum((scale / due - 1).abs(), (scale / floor - 1).abs())
    mantissa, _ = torch.frexp(scale)
    fits = (mantissa == 0.5) & (scale * (1 + FORMULA) >= due) & (scale < 2 * (1 + FORMULA) * floor)
    by_power = torch.where(fits, 0.0, torch.maximum((scale / due - 1).abs(), torch.full_like(due, 2 * FORMULA)))
    by_value, by_power = (torch.where(amax > 0, off, 0.0) for off in (by_value, by_power))
    if bool((by_value <= FORMULA).all()) or not bool((by_power <= FORMULA).all()):
        return torch.nan_to_num(by_value, nan=torch.inf), ""
    return by_power, "scales are powers of two"


def _in_words(
    bad: torch.Tensor, steps: torch.Tensor, x: torch.Tensor, code: torch.Tensor, scale: torch.Tensor
) -> tuple[str, str]:
    """(pattern, message): the slope of each bad block where it explains its error, else what a single code is."""
    count = f"{int(bad.sum())} of {bad.numel()} blocks"
    if bool(torch.isinf(steps[bad]).any()):
        return "not a number", f"{count} hold a code or scale that is no number where the value is one"
    code, truth, own = code[bad], x[bad], scale[bad][:, None]
    largest = FORMATS[ELEMENT].largest
    saturated = (code.abs() == largest) & (steps[bad] > HALF_STEP) & (truth.abs() > largest * own)
    if bool(saturated.any()):
        return "saturated", f"{count} are saturated below the format's range: their scale is too small"
    energy = truth.square().sum(-1).clamp(min=1e-300)
    slope = (code * own * truth).sum(-1) / energy
    noise = (truth * ulp((truth / own).contiguous(), ELEMENT) * own).square().sum(-1)
    scaled = (slope - 1).abs() > SPREADS * (noise / 12).sqrt() / energy
    if bool(scaled.float().mean() > 0.5):
        low, high = float(slope[scaled].min()), float(slope[scaled].max())
        where = f"by {low:.4g}" if high - low < 1e-3 * high else f"by {low:.4g} to {high:.4g}"
        pattern = "scale block" if int(bad.sum()) == 1 else "scale blocks"
        return pattern, f"{count} decode to values that are off {where}: the scale is not the one of its codes"
    return (
        "wrong code",
        f"{count} hold codes that are not the nearest at their own scale; the worst is "
        f"{float(steps[bad].max()):.3g} steps off where half a step is legal",
    )


def _refused(what: str, message: str) -> Judgement:
    return Judgement(0, 0, {what: 1.0}, {what: 0.0}, what, pattern=f"wrong {what}", message=message)
