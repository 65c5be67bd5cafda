"""Operators of the fast path as torch.compile makes them, with shapes that may change, each as one graph.

Three groups are fused: a residual and the norm behind it, gate and activation (with up and down) of an MLP, index
scores and the maxima of their blocks. A group stays inside the borders of its operators, so that every tap is still
there and observing changes nothing: the first operator of a group makes in its one pass what the next would pass over
its result again for, and hands it on beside the result (`Handed`). The plain formulas are given to the compiler, not
the blocked forms that the uncompiled operators use on a CPU.

A decode step of one row that nobody observes has no taps to keep: there a whole sublayer is a graph (`one_row_step`).
"""

from __future__ import annotations

import os
import shutil
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from day0check.accelerated.ops import index
from day0check.accelerated.ops.arithmetic import by_owner, split_rows, wide
from day0check.accelerated.ops.spine import gated
from day0check.errors import Unavailable

RESIDUAL_AND_NORM, GATE_AND_ACTIVATION, SCORE_AND_MAXIMA = GROUPS = (
    "residual + norm",
    "gate + activation",
    "index score + block maxima",
)
Calls = dict[str, int]  # of each group, so far


class Handed:
    """What one operator hands to the next beside its result: good for that very tensor, as long as it is unchanged.
    What is taken is counted as a call of the `group`."""

    def __init__(self, group: str, calls: Calls) -> None:
        self._group, self._calls = group, calls
        self._latest: tuple[weakref.ref[Tensor], int, Tensor] | None = None

    def give(self, result: Tensor, beside: Tensor) -> Tensor:
        self._latest = (weakref.ref(result), result._version, beside)
        return result

    def of(self, tensor: Tensor) -> Tensor | None:
        """What was handed on with `tensor`; None where it is another one, or was written to since."""
        latest = self._latest
        if latest is None or latest[0]() is not tensor or latest[1] != tensor._version:
            return None
        self._calls[self._group] += 1
        return latest[2]


def rms_norm(x: Tensor, *, weight: Tensor | None = None, eps: float) -> Tensor:
    """As `ops.spine.rms_norm`."""
    a = wide(x)
    y = a * torch.rsqrt(torch.mean(torch.square(a), -1, keepdim=True) + eps)
    return (y if weight is None else y * weight.to(a.dtype)).to(x.dtype)


def normed(x: Tensor, *, squares: Tensor, weight: Tensor | None = None, eps: float) -> Tensor:
    """`rms_norm` of `x` [rows, D] whose mean squares [rows, 1] are known."""
    a = wide(x)
    y = a * torch.rsqrt(squares + eps)
    return (y if weight is None else y * weight.to(a.dtype)).to(x.dtype)


def residual_mix(sources: Tensor, *, norm_weight: Tensor, proj: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `ops.spine.residual_mix`, and the mean squares [rows, 1] of its result, for the norm behind it."""
    v = wide(sources)
    direction = norm_weight.to(v.dtype) * proj.reshape(-1).to(v.dtype)
    logits = (v * direction).sum(-1) * torch.rsqrt(torch.mean(torch.square(v), -1) + eps)
    y = (torch.softmax(logits, -1).unsqueeze(-1) * v).sum(1).to(sources.dtype)
    return y, torch.mean(torch.square(wide(y)), -1, keepdim=True)


def residual_add(x: Tensor, *, y: Tensor) -> tuple[Tensor, Tensor]:
    """As `ops.spine.residual_add`, and the mean squares [rows, 1] of its result, for the norm behind it."""
    total = torch.add(x, y)
    return total, torch.mean(torch.square(wide(total)), -1, keepdim=True)


def scored(q: Tensor, weights: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Index scores [rows, n] of `q` [rows, H, d] on `keys` [n, d], n a multiple of GROUP, with the weights [rows, H]
    of the heads; and their maxima [rows, n / GROUP] over GROUP neighbours."""
    dots = F.relu(q.flatten(0, 1) @ keys.T).view(q.shape[0], q.shape[1], -1)
    scores = (weights.unsqueeze(-1) * dots).sum(1)
    return scores, scores.unflatten(1, (-1, index.GROUP)).amax(-1)


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
    "norm.rms behind a residual": normed,
    "residual.mix": residual_mix,
    "residual.add": residual_add,
    "mlp.dense": mlp,
    "moe.shared": mlp,
    "dsa.score of a request": scored,
}


def compiled(table: Mapping[str, Callable[..., Any]], calls: Calls) -> dict[str, Callable[..., Any]]:
    """`table` with the operators of the fused groups compiled, which count their `calls`; nothing is compiled before
    it is called."""
    calls |= dict.fromkeys(GROUPS, 0)
    options = {"emulate_precision_casts": True}  # a result that is rounded is used as rounded inside a graph, too
    made = {
        name: torch.compile(function, dynamic=True, fullgraph=True, options=options) for name, function in PLAIN.items()
    }
    mlps = {name: _quantised_apart(table[name], made[name], calls) for name in ("mlp.dense", "moe.shared")}
    return {**table, **mlps, **_residual_and_norm(made, calls), **_score_and_maxima(made, table, calls)}


def one_graph(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of `one_row`, whose shapes are those of the model, as one graph."""
    return torch.compile(function, dynamic=False, fullgraph=True)


def _residual_and_norm(made: Mapping[str, Callable[..., Any]], calls: Calls) -> dict[str, Callable[..., Any]]:
    squares = Handed(RESIDUAL_AND_NORM, calls)

    def mix(sources: Tensor, **keywords: Any) -> Tensor:
        return squares.give(*made["residual.mix"](sources, **keywords))

    def add(x: Tensor, *, y: Tensor) -> Tensor:
        return squares.give(*made["residual.add"](x, y=y))

    def norm(x: Tensor, **keywords: Any) -> Tensor:
        known = squares.of(x)
        if known is None:
            return made["norm.rms"](x, **keywords)
        return made["norm.rms behind a residual"](x, squares=known, **keywords)

    return {"residual.mix": mix, "residual.add": add, "norm.rms": norm}


def _score_and_maxima(
    made: Mapping[str, Callable[..., Any]], table: Mapping[str, Callable[..., Any]], calls: Calls
) -> dict[str, Callable[..., Any]]:
    maxima = Handed(SCORE_AND_MAXIMA, calls)

    def score(q: Tensor, *, weights: Tensor, keys: Tensor, owner: Tensor, scale: float) -> Tensor:
        """As `ops.index.score`, a block of rows of one request at a time."""
        rows, heads, _ = q.shape
        n = keys.shape[1]
        if not rows or n % index.GROUP or not n:
            return table["dsa.score"](q, weights=weights, keys=keys, owner=owner, scale=scale)
        a = wide(q)
        w = (weights * scale).to(a.dtype)
        out, best = a.new_zeros(rows, n), a.new_zeros(rows, n // index.GROUP)
        size = max(1, index.DOT_ELEMENTS // (heads * n))
        for request, rows_of_it in by_owner(owner, keys.shape[0]):
            k = wide(keys[request])
            for mine in split_rows(rows_of_it, size):
                out[mine], best[mine] = made["dsa.score of a request"](a[mine], w[mine], k)
        return maxima.give(out, best)

    def select(scores: Tensor, **keywords: Any) -> Tensor:
        known = maxima.of(scores)
        if known is None:
            return table["dsa.select"](scores, **keywords)
        return index.select_knowing(scores, known, **keywords)

    return {"dsa.score": score, "dsa.select": select}


def _quantised_apart(plain: Callable[..., Any], made: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    """The compiled operator; calls on quantised rows go to the plain one."""

    def call(first: Tensor, **keywords: Any) -> Any:
        if keywords.get("x_scale") is not None:
            return plain(first, **keywords)
        keywords.pop("x_scale", None)
        calls[GATE_AND_ACTIVATION] += 1
        return made(first, **keywords)

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
