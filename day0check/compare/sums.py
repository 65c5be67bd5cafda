"""The float32 floor: the standard deviation that float32 arithmetic in any legal order adds to an exact result.

For a sum of K products it is sqrt(K)/8 2^-24 sqrt(sum a^2 b^2) (method notes, section 1, item 1): a bilinear operator
gives sum a^2 b^2 when called on squared arguments. Other operators are measured: the reference once in float32, and
once in float64 on arguments moved by a unit of float32 each, which shows how the formula passes errors on.
"""

from __future__ import annotations

import math

import torch

from day0check.compare.noise import fit_rows_and_columns
from day0check.compare.replay import Replay

UNIT = 2.0**-24
LEAST_TERMS = 64  # sqrt(K) / 8 is at least 1: few terms still round each product and each sum
SMALLEST_SQUARE = 2.0**-100  # far enough above where float32 underflows that no product is lost
ONE_ORDER = 4.0  # the spread over all legal orders against the one order that was run
ANGLE_ULPS = 2.0  # how far a frequency computed in float32 lies from the one rounded once

BILINEAR_TERMS = {
    "moe.combine": lambda a: a["weights"].shape[-1],
    "residual.collapse": lambda a: a["streams"].shape[1],
    "residual.update": lambda a: a["streams"].shape[1] + 1,
    "dsa.score": lambda a: a["q"].shape[-1] + a["q"].shape[-2],
}


def float32_floor(replay: Replay, oracle: tuple[torch.Tensor, ...], generator: torch.Generator) -> list[torch.Tensor]:
    """One float64 tensor per floating-point result, of its shape: the float32 floor of each element.

    replay holds float64 arguments, oracle its results. `generator` is on the device of the tensors.
    """
    name, reference = replay.contract.name, replay.contract.reference
    if reference.startswith("reference.linear:"):
        terms = replay.arguments[replay.contract.args[0].name].shape[-1]
        return [_products(replay, terms)]
    if name == "dsa.index_weights":
        heads = replay.arguments["weight"].shape[0]
        return [_products(replay, replay.arguments["x"].shape[-1]) * heads**-0.25]
    if name in BILINEAR_TERMS:
        return [_products(replay, BILINEAR_TERMS[name](replay.arguments))]
    if name == "moe.scores":
        return [_router(replay, oracle[0])]
    if name == "norm.rms":
        width = oracle[0].shape[-1]
        return [oracle[0].abs() * (UNIT * (1 + math.sqrt(width) / 8))]
    if name in ("image.preprocess", "image.preprocess_in_budget"):
        return [(oracle[0].abs() + 1) * UNIT]
    floors = _measured(replay, oracle, generator)
    if name in ("rope.apply", "vision.rope", "vision.rope_axial"):
        floors[0] = floors[0] + _angle(replay, oracle[0])
    return floors


def simple_floor(oracle: torch.Tensor) -> torch.Tensor:
    """A floor for results whose inner roundings drown float32 sums anyway: a few units of the row's own size."""
    size = oracle.square().mean(-1, keepdim=True).sqrt() if oracle.dim() > 1 else oracle.abs()
    return (4 * UNIT) * size + UNIT * oracle.abs()


def _products(replay: Replay, terms: int) -> torch.Tensor:
    """sqrt(K)/8 2^-24 sqrt(sum a^2 b^2), by the operator itself on squared arguments: in float32, which takes half the
    time, and again in float64 where squares leave its range."""
    total = _on_squares(replay.wide(torch.float32))
    if not SMALLEST_SQUARE <= float(total.min()) <= float(total.max()) < float("inf"):
        total = _on_squares(replay)
    return total.to(torch.float64).sqrt_().mul_(UNIT * math.sqrt(max(terms, LEAST_TERMS)) / 8)


def _on_squares(replay: Replay) -> torch.Tensor:
    squared = {name: value.square() for name, value in replay.floats().items()}
    if "scale" in replay.arguments:
        squared["scale"] = replay.arguments["scale"] ** 2
    if "owner" in replay.arguments:
        squared["owner"] = replay.arguments["owner"]
    return replay.changed(**squared).run()[0]


def _router(replay: Replay, scores: torch.Tensor) -> torch.Tensor:
    """Through the sigmoid or softmax: the logit's floor times the slope, and a few roundings of the result itself."""
    from reference.linear import linear

    x, weight = replay.arguments["x"], replay.arguments["weight"]
    squares = linear(x.to(torch.float32).square(), weight=weight.to(torch.float32).square()).to(torch.float64)
    logits = squares.sqrt_().mul_(UNIT * math.sqrt(max(x.shape[-1], LEAST_TERMS)) / 8)
    if replay.arguments["scoring"] == "logit":
        return logits + 2 * UNIT * scores.abs()
    if replay.arguments["scoring"] == "sigmoid":
        return scores * (1 - scores) * logits + 2 * UNIT * scores
    return scores * (1.5 * logits.amax(-1, keepdim=True) + 2 * UNIT)


def _measured(replay: Replay, oracle: tuple[torch.Tensor, ...], generator: torch.Generator) -> list[torch.Tensor]:
    in_float32 = replay.wide(torch.float32).run()
    moved = replay.changed(**{n: _moved(v, generator) for n, v in replay.floats().items()}).run()
    terms = max([LEAST_TERMS, *(v.shape[-1] for v in replay.floats().values() if v.dim())])
    floors = []
    for exact, low, shifted in zip(oracle, in_float32, moved, strict=True):
        if not exact.is_floating_point():
            continue
        order = _finite(low.to(torch.float64) - exact).square_()
        passed_on = _finite(shifted - exact).square_()
        variance = ONE_ORDER**2 * smooth(order) + terms / 64 * smooth(passed_on)
        floors.append((variance + (UNIT * _finite(exact)).square()).sqrt_())
    return floors


def _moved(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """x with every element off by one unit of float32, up or down at random."""
    up = torch.rand(x.shape, generator=generator, dtype=torch.float32, device=x.device) < 0.5
    return x + torch.where(up, UNIT, -UNIT) * x


def _finite(x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0)


def smooth(squares: torch.Tensor) -> torch.Tensor:
    """Squares of single errors as a smooth map of their variance, same shape: rows times columns where there are
    enough rows (the heads count as rows), else the mean of the row."""
    if squares.dim() < 2 or squares.shape[-1] < 2:
        return squares.mean().expand_as(squares)
    flat = squares.reshape(-1, 1, squares.shape[-1])
    if flat.shape[0] < 8:
        return flat.mean(-1, keepdim=True).expand_as(flat).reshape(squares.shape)
    return fit_rows_and_columns(flat, samples=1).reshape(squares.shape)


def _angle(replay: Replay, oracle: torch.Tensor) -> torch.Tensor:
    """What a frequency off by float32 roundings does: position times frequency times units, on the pair's size.

    The frequency of pair i is at most theta^(-2i/d); scaling only makes it smaller. Divided by the bound's 16.
    """
    width = oracle.shape[-1]
    theta = replay.arguments["theta"]
    name = replay.contract.name
    interleaved = name == "vision.rope" or replay.arguments.get("layout") == "interleaved"
    pair = torch.arange(width, device=oracle.device)
    pair = pair // 2 if interleaved else pair % (width // 2)
    if name != "rope.apply":
        furthest = max(max(h, w) for _, h, w in replay.arguments["grids"])
        pair = pair // 2 if interleaved else pair % (width // 4)  # every frequency turns one pair by row, one by column
        frequency = theta ** (-4.0 * pair.to(torch.float64) / width)
        position = torch.tensor(float(furthest), dtype=torch.float64, device=oracle.device)
    else:
        frequency = theta ** (-2.0 * pair.to(torch.float64) / width)
        position = replay.arguments["positions"].to(torch.float64).reshape(oracle.shape[0], -1).amax(1)[:, None, None]
    partner = oracle.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else oracle.roll(width // 2, -1)
    return (ANGLE_ULPS * UNIT / 16) * position * frequency * torch.hypot(oracle, partner)
