"""Hard inputs of what only some families have: pooled index keys and their vision towers."""

from __future__ import annotations

from typing import Any

import torch

from day0check.contracts.hard_inputs import Draw, Generator
from day0check.contracts.hard_inputs_spine import linear
from day0check.contracts.hard_inputs_vision import rope

ROWS, POOL, CHOSEN = 37, 4, 6
HIDDEN = 48
Arguments = tuple[Any, dict[str, Any]]


def _expand(d: Draw, name: str) -> Arguments:
    """Rows at every offset of a pool; `whole_pools`: none has a tail, `fewer_than_k`: there are not enough pools."""
    first = 1 if name == "fewer_than_k" else CHOSEN * POOL
    visible = first + torch.arange(ROWS, device=d.device) + d.integers(0, POOL, 1)
    if name == "whole_pools":
        visible = visible // POOL * POOL
    pools = visible // POOL
    rank = torch.rand(ROWS, int(pools.max()), generator=d.generator).to(d.device)
    hidden = torch.arange(rank.shape[1], device=d.device) >= pools.unsqueeze(1)
    best = rank.masked_fill(hidden, -1).topk(CHOSEN, dim=-1)
    chosen = best.indices.masked_fill(best.values < 0, -1).to(torch.int32)
    if name == "all_minus_one":
        chosen[::3] = -1
    return chosen, {"visible": visible, "pool": POOL, "tail": name != "no_tail"}


# ------------------------------------------------------------------------------------------------------------- towers


def _in_budget(d: Draw, name: str) -> Arguments:
    height, width, channels = {
        "square": (84, 84, 3),
        "odd_size": (45, 61, 3),
        "over_budget": (300, 400, 3),
        "one_patch": (9, 11, 3),
        "gray": (40, 33, 1),
        "alpha": (50, 64, 4),
    }[name]
    across = torch.arange(width)[None, :, None] * 3 + torch.arange(height)[:, None, None] * 2
    noise = torch.randint(0, 60, (height, width, channels), generator=d.generator)
    image = ((across + noise) % 256).to(torch.uint8).to(d.device)
    budget = {"patch": 14, "merge": 2, "min_tokens": 4, "max_tokens": 36}
    return image, {**budget, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def _layer_norm(d: Draw, name: str) -> Arguments:
    x = d.rows(name, ROWS, HIDDEN)
    return x, {"weight": d.norm_weight(HIDDEN), "bias": d.act(HIDDEN, scale=0.2), "eps": 1e-5}


def _gated_mlp(d: Draw, name: str) -> Arguments:
    x = d.rows(name, ROWS, HIDDEN, scale=8.0 if name == "large_gate" else 1.0)
    parts = {"gate": d.weight(96, HIDDEN), "up": d.weight(96, HIDDEN), "down": d.weight(HIDDEN, 96)}
    biases = {f"{part}_bias": d.act(weight.shape[0], scale=0.1) for part, weight in parts.items()}
    return x, {**parts, **biases, "limit": 2.0}


def _project_plain(d: Draw, name: str) -> Arguments:
    wide = 4 * HIDDEN
    biases = {"bias0": d.act(wide, scale=0.1), "bias1": d.act(64, scale=0.1)}
    return d.rows(name, 19, wide), {"w0": d.weight(wide, wide), "w1": d.weight(64, wide), **biases}


GENERATORS: dict[str, Generator] = {
    "dsa.pool_gate": linear,
    "dsa.expand": _expand,
    "image.preprocess_in_budget": _in_budget,
    "norm.layer": _layer_norm,
    "vision.rope_axial": rope,
    "vision.gated_mlp": _gated_mlp,
    "vision.downsample": linear,
    "vision.merger_project": linear,
    "vision.normed_gelu": _layer_norm,
    "vision.project_plain": _project_plain,
}
