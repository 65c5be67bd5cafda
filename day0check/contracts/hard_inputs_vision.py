"""Hard inputs of the vision tower."""

from __future__ import annotations

from typing import Any

import torch

from day0check.contracts.hard_inputs import Draw, Generator

HIDDEN, HEADS = 48, 4
Grids = tuple[tuple[int, int, int], ...]
Arguments = tuple[Any, dict[str, Any]]


def _grids(name: str) -> Grids:
    return {
        "native_grid": ((1, 8, 8),),
        "two_images": ((1, 4, 6), (1, 6, 2)),
        "two_frames": ((2, 4, 4),),
    }.get(name, ((1, 6, 10),))


def _patches(grids: Grids) -> int:
    return sum(t * h * w for t, h, w in grids)


def _preprocess(d: Draw, name: str) -> Arguments:
    height, width, channels = {
        "square": (56, 56, 3),
        "odd_size": (45, 61, 3),
        "over_limit": (400, 300, 3),
        "one_patch": (9, 11, 3),
        "gray": (40, 33, 1),
        "alpha": (50, 64, 4),
    }[name]
    across = torch.arange(width)[None, :, None] * 3 + torch.arange(height)[:, None, None] * 2
    noise = torch.randint(0, 60, (height, width, channels), generator=d.generator)
    image = ((across + noise) % 256).to(torch.uint8)
    limits = {"patch": 14, "merge": 2, "patch_limit": 144, "side_limit": 16}
    return image.to(d.device), {**limits, "mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}


def _position(d: Draw, name: str) -> Arguments:
    grids = _grids(name)
    return d.act(_patches(grids), HIDDEN), {"table": d.act(8, 8, HIDDEN), "grids": grids, "mode": "bilinear"}


def rope(d: Draw, name: str) -> Arguments:
    grids = _grids(name)
    return d.act(_patches(grids), HEADS, 16), {"grids": grids, "theta": 10000.0}


def _attention(d: Draw, name: str) -> Arguments:
    grids = _grids(name)
    ends = torch.tensor([t * h * w for t, h, w in grids]).cumsum(0).tolist()
    q, k, v = (d.act(ends[-1], HEADS, 16) for _ in range(3))
    scale = (12.0 if name == "sharp" else 1.0) * 16**-0.5
    return q, {"k": k, "v": v, "offsets": d.whole([0, *ends]), "scale": scale}


def _mlp(d: Draw, name: str) -> Arguments:
    return d.rows(name, 37, HIDDEN), {
        "fc0": d.weight(96, HIDDEN),
        "fc1": d.weight(HIDDEN, 96),
        "bias0": d.act(96, scale=0.1),
        "bias1": d.act(HIDDEN, scale=0.1),
    }


def _merge(d: Draw, name: str) -> Arguments:
    grids = _grids(name)
    return d.act(_patches(grids), HIDDEN), {"grids": grids, "merge": 2}


def _project(d: Draw, name: str) -> Arguments:
    wide = 4 * HIDDEN
    return d.rows(name, 19, wide), {
        "w0": d.weight(wide, wide),
        "w1": d.weight(64, wide),
        "norm_weight": d.norm_weight(64),
        "eps": 1e-5,
    }


GENERATORS: dict[str, Generator] = {
    "image.preprocess": _preprocess,
    "vision.position": _position,
    "vision.rope": rope,
    "vision.attention": _attention,
    "vision.mlp": _mlp,
    "vision.merge": _merge,
    "vision.project": _project,
}
