"""Hard inputs of linear layers, norms, the residual spine, dense MLPs, rotary embedding and the output."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from day0check.contracts.hard_inputs import Draw, Generator

ROWS, WIDTH = 37, 96  # no multiple of a tile
Arguments = tuple[Any, dict[str, Any]]


def linear(d: Draw, name: str, *, out: int = 80, width: int = WIDTH) -> Arguments:
    return d.rows(name, ROWS, width), {"weight": d.weight(out, width)}


def _quantise(d: Draw, name: str) -> Arguments:
    return d.rows(name, ROWS, 160), {}  # one whole block of 128 columns and one cut short


def _embed(d: Draw, name: str) -> Arguments:
    ids = d.integers(0, 320, ROWS)
    ids[0], ids[-1] = 0, 319
    return ids, {"weight": d.act(320, 64)}


def _splice_positions(d: Draw, name: str) -> Arguments:
    pad = 300
    ids = d.integers(0, 256, ROWS)
    if name == "two_images":
        ids[4:10], ids[20:29] = pad, pad
    elif name == "cut_inside_image":
        ids[:7] = pad
    return ids, {"media_pad": pad, "first": 5 if name == "cut_inside_image" else 0}


def _splice_merge(d: Draw, name: str) -> Arguments:
    at = d.whole([] if name == "no_image" else [*range(4, 10), *range(20, 29)])
    return d.act(ROWS, 64), {"features": d.act(len(at), 64), "at": at}


def _rms_norm(d: Draw, name: str) -> Arguments:
    return d.rows(name, ROWS, 64), {"weight": d.norm_weight(64), "eps": 1e-5}


def _add(d: Draw, name: str) -> Arguments:
    x = d.act(ROWS, 64)
    y = -x * (1 + 2.0**-7) if name == "cancellation" else d.act(ROWS, 64)
    return x, {"y": y.to(x.dtype)}


def _mix(d: Draw, name: str) -> Arguments:
    sources = d.rows(name, ROWS, 1 if name == "one_source" else 5, 64)
    if name == "equal_sources":
        sources = sources[:, :1].expand(-1, 5, -1).contiguous()
    return sources, {"norm_weight": d.norm_weight(64), "proj": d.act(64, scale=0.3), "eps": 1e-5}


def _store(d: Draw, name: str) -> Arguments:
    bank = d.act(4, ROWS, 64)
    return bank, {"value": d.act(ROWS, 64), "slot": 0 if name == "first_slot" else len(bank) - 1}


def _coefficients(d: Draw, name: str) -> Arguments:
    n, width = 4, 32
    streams = d.raw(ROWS, 1 if name == "equal_streams" else n, width).expand(-1, n, -1).contiguous()
    return d.to(streams), {
        "fn": d.weight(n * (2 + n), n * width),
        "base": d.float32(n * (2 + n), scale=0.5),
        "scale": d.float32(3, scale=0.1) + 1,
        "eps": 1e-5,
        "hc_eps": 1e-6,
        "iterations": 20,
    }


def _collapse(d: Draw, name: str) -> Arguments:
    return d.act(ROWS, 4, 32), {"pre": torch.sigmoid(d.raw(ROWS, 4)).to(d.device)}


def _update(d: Draw, name: str) -> Arguments:
    return d.act(ROWS, 4, 32), {
        "output": d.act(ROWS, 32),
        "post": (2 * torch.sigmoid(d.raw(ROWS, 4))).to(d.device),
        "comb": torch.softmax(d.raw(ROWS, 4, 4), -1).to(d.device),
    }


def activation(name: str) -> dict[str, Any]:
    """SiTU where its bounds matter, SwiGLU with outliers."""
    if name == "outlier_channel":
        return {"activation": "silu"}
    return {"activation": "situ", "beta": 4.0, "linear_beta": 25.0}


def mlp(d: Draw, name: str) -> Arguments:
    x = d.rows(name, ROWS, 64, scale=20.0 if name == "large_gate" else 1.0)
    weights = {"gate": d.weight(WIDTH, 64), "up": d.weight(WIDTH, 64), "down": d.weight(64, WIDTH)}
    return x, {**weights, **activation(name)}


def _rope(d: Draw, name: str) -> Arguments:
    positions = d.integers(0, 4096, ROWS)
    if name == "position_zero":
        positions = torch.arange(ROWS, device=d.device)
    elif name == "long_position":
        positions = 131_072 - ROWS + torch.arange(ROWS, device=d.device)
    elif name == "million_positions":
        positions = 1_000_000 - ROWS + torch.arange(ROWS, device=d.device)
    layout = "half" if name == "position_zero" else "interleaved"
    given = {"positions": positions, "theta": 10000.0, "layout": layout, "yarn": None}
    if name == "three_axes":
        given |= {"positions": d.integers(0, 4096, ROWS, 3), "sections": (2, 3, 3)}
    return d.act(ROWS, 4, 16), given


def _sample(d: Draw, name: str) -> Arguments:
    logits = d.raw(ROWS, 320, scale=2.0)
    if name == "ties":
        logits = torch.round(logits)
    elif name == "all_negative":
        logits = -logits.abs() - 5
    temperature = torch.full((ROWS,), 0.8 if name == "sampled" else 0.0)
    return logits.to(d.device), {
        "temperature": temperature.to(d.device),
        "seed": d.integers(0, 2**31, ROWS),
        "positions": torch.arange(ROWS, device=d.device),
    }


_LINEAR = (
    "mla.query",
    "mla.latent",
    "mla.gate",
    "dsa.index_query",
    "kda.project",
    "moe.down",
    "moe.up",
    "draft.project",
)

GENERATORS: dict[str, Generator] = {
    **dict.fromkeys((*_LINEAR, "vision.qkv", "vision.output"), linear),
    "vision.patch": partial(linear, out=48, width=588),
    "head.logits": partial(linear, out=320),
    "mla.expand": partial(linear, out=128, width=32),
    "quantise.rows": _quantise,
    "embed.tokens": _embed,
    "splice.positions": _splice_positions,
    "splice.merge": _splice_merge,
    "norm.rms": _rms_norm,
    "residual.add": _add,
    "residual.mix": _mix,
    "residual.store": _store,
    "residual.coefficients": _coefficients,
    "residual.collapse": _collapse,
    "residual.update": _update,
    "mlp.dense": mlp,
    "moe.shared": mlp,
    "rope.apply": _rope,
    "sample.token": _sample,
}
