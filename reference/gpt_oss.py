"""The expert layer of gpt-oss (model.md 2.6, 3): MXFP4 experts with biases, gate and up interleaved, clamped.

E experts, k per row, D hidden, I expert width. Attention and the rest of the model are not here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference import moe as mixture
from reference.formats import mxfp4_decode
from reference.layers import Call, just_call
from reference.linear import linear_float32
from reference.ordering import best, rank
from reference.rounding import Round, exact, wide

ALPHA, LIMIT = 1.702, 7.0


@dataclass(frozen=True)
class ExpertLayer:
    """Decoded. `router` [E, D], `router_bias` [E]; `w1` (gate) and `w3` (up) [E, I, D] with `b1` and `b3` [E, I]; `w2`
    [E, D, I] with `b2` [E, D]."""

    router: Tensor
    router_bias: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor
    b1: Tensor
    b3: Tensor
    b2: Tensor


def read_expert_layer(
    tensor: Callable[[str], Tensor], *, prefix: str = "model.layers.0.mlp", dtype: torch.dtype = torch.float64
) -> ExpertLayer:
    """The expert layer under `prefix` of a released checkpoint; `tensor` gives a stored tensor by its name.

    Blocks are uint8 [E, rows, groups, 16], scales uint8 [E, rows, groups]: rows are outputs, groups lie along the
    input. Rows of gate_up (and entries of its bias) alternate: even gate, odd up. Raises ValueError on a NaN scale.
    """
    gate_up = decode_blocks(tensor, f"{prefix}.experts.gate_up_proj", dtype)
    gate_up_bias = tensor(f"{prefix}.experts.gate_up_proj_bias").to(dtype)
    return ExpertLayer(
        router=tensor(f"{prefix}.router.weight").to(dtype),
        router_bias=tensor(f"{prefix}.router.bias").to(dtype),
        w1=gate_up[:, 0::2],
        w3=gate_up[:, 1::2],
        w2=decode_blocks(tensor, f"{prefix}.experts.down_proj", dtype),
        b1=gate_up_bias[:, 0::2],
        b3=gate_up_bias[:, 1::2],
        b2=tensor(f"{prefix}.experts.down_proj_bias").to(dtype),
    )


def decode_blocks(tensor: Callable[[str], Tensor], name: str, dtype: torch.dtype) -> Tensor:
    """[E, rows, 32 * groups] of `name`_blocks and `name`_scales."""
    return mxfp4_decode(tensor(f"{name}_blocks").flatten(-2), tensor(f"{name}_scales"), dtype=dtype)


def route_by_logit(logits: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """The k largest logits of each row and their softmax among themselves.

    logits [rows, E] -> ids int64 [rows, k] in ascending order, weights [rows, k]. Ties: the lower expert.
    """
    ids = torch.nonzero(best(rank(logits), k))[:, 1].reshape(-1, k)
    return ids, torch.softmax(logits.gather(1, ids), dim=-1)


def experts(
    x: Tensor,
    *,
    offsets: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    b1: Tensor,
    b3: Tensor,
    b2: Tensor,
    limit: float,
    alpha: float,
    round: Round = exact,
) -> Tensor:
    """(u + 1) g sigmoid(alpha g) through w2, with g = min(x w1^T + b1, limit), u = clamp(x w3^T + b3, -limit, limit).

    x [pairs, D], of which offsets[a]:offsets[a + 1] belong to active expert a; w1 and w3 [A, I, D], w2 [A, D, I]
    -> [pairs, D] in x's dtype. The inner points are called once per expert.
    """
    a = wide(x, w1)[0]
    y = a.new_zeros(x.shape[0], w2.shape[1])
    for e, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        if start == end:
            continue
        own = a[start:end]
        gate, up, down = (w[e].to(a.dtype) for w in (w1, w3, w2))
        g = round("gate", own @ gate.T + b1[e].to(a.dtype)).clamp(max=limit)
        u = round("up", own @ up.T + b3[e].to(a.dtype)).clamp(-limit, limit)
        y[start:end] = round("h", (u + 1) * g * torch.sigmoid(alpha * g)) @ down.T + b2[e].to(a.dtype)
    return round("out", y).to(x.dtype)


def expert_layer(
    x: Tensor,
    layer: ExpertLayer,
    *,
    k: int,
    limit: float = LIMIT,
    alpha: float = ALPHA,
    place: str = "",
    call: Call = just_call,
) -> Tensor:
    """Routed experts of x [rows, D] -> [rows, D]. Every expert's bias counts with its weight, as its product does."""
    logits = call(place, "moe.logits", linear_float32, x, weight=layer.router, bias=layer.router_bias)
    ids, weights = call(place, "moe.route_by_logit", route_by_logit, logits, k=k)
    count = layer.router.shape[0]
    pairs, order, active, offsets = call(place, "moe.dispatch", mixture.dispatch, x, ids=ids, experts=count)
    own = {name: getattr(layer, name)[active] for name in ("w1", "w3", "w2", "b1", "b3", "b2")}
    y = call(place, "moe.biased_experts", experts, pairs, offsets=offsets, **own, limit=limit, alpha=alpha)
    return call(place, "moe.combine", mixture.combine, y, order=order, weights=weights)
