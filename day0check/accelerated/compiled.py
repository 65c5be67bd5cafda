"""Operators of the fast path as torch.compile makes them, with shapes that may change, each as one graph.

What is fused stays inside an operator's borders, so that every tap is still there: a norm with its scaling, a residual
mix from its logits to its sum, gate, up, activation and down of an MLP. The plain formulas are given to the compiler,
not the blocked forms that the uncompiled operators use on a CPU.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from day0check.accelerated.ops.arithmetic import wide
from day0check.accelerated.ops.spine import gated
from day0check.errors import Unavailable


def rms_norm(x: Tensor, *, weight: Tensor | None = None, eps: float) -> Tensor:
    """As `ops.spine.rms_norm`."""
    a = wide(x)
    y = a * torch.rsqrt(torch.mean(torch.square(a), -1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(a.dtype)).to(x.dtype)


def residual_mix(sources: Tensor, *, norm_weight: Tensor, proj: Tensor, eps: float) -> Tensor:
    """As `ops.spine.residual_mix`."""
    v = wide(sources)
    direction = norm_weight.to(v.dtype) * proj.reshape(-1).to(v.dtype)
    logits = (v * direction).sum(-1) * torch.rsqrt(torch.mean(torch.square(v), -1) + eps)
    return (torch.softmax(logits, -1).unsqueeze(-1) * v).sum(1).to(sources.dtype)


def mlp(
    x: Tensor,
    *,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    activation: str,
    beta: float | None = None,
    linear_beta: float | None = None,
    limit: float | None = None,
) -> Tensor:
    """As `ops.spine.mlp`."""
    a = wide(x)
    g, u = a @ gate.to(a.dtype).T, a @ up.to(a.dtype).T
    h = gated(g, u, activation, beta, linear_beta, limit).to(x.dtype)
    return (wide(h) @ down.to(a.dtype).T).to(x.dtype)


PLAIN: dict[str, Callable[..., Any]] = {
    "norm.rms": rms_norm,
    "residual.mix": residual_mix,
    "mlp.dense": mlp,
    "moe.shared": mlp,
}


def compiled(table: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """`table` with the operators of `PLAIN` compiled; nothing is compiled before it is called."""
    made = {name: torch.compile(function, dynamic=True, fullgraph=True) for name, function in PLAIN.items()}
    return {**table, **{name: _quantised_apart(table[name], made[name]) for name in made}}


def _quantised_apart(plain: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled operator; calls on quantised rows go to the plain one."""

    def call(first: Tensor, **keywords: Any) -> Any:
        return (plain if keywords.get("x_scale") is not None else made)(
            first, **{name: value for name, value in keywords.items() if name != "x_scale" or value is not None}
        )

    return call


def check_compiler(device: torch.device) -> None:
    """Raises Unavailable where the compiler that torch.compile needs for `device` is not there."""
    if device.type != "cpu":
        return
    wanted = os.environ.get("CXX", "g++")
    if shutil.which(wanted) is None and shutil.which("clang++") is None:
        raise Unavailable(
            f"there is no C++ compiler ({wanted}), which torch.compile needs on a CPU",
            where="--compile",
            todo="install g++ or clang++, or name one in CXX",
        )
