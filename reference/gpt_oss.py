"""The expert layer of gpt-oss (model.md 2.6, 3): MXFP4 experts with biases, gate and up interleaved, clamped.

E experts, k per row, D hidden, I expert width. Attention and the rest of the model are not here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference import moe as mixture
from reference.formats import mxfp4_decode
from reference.layers import Call, just_call

ALPHA, LIMIT = 1.702, 7.0
ACTIVATION = "clamped_plus_one"
ROUTING = {
    "bias": None,
    "groups": 1,
    "kept_groups": 1,
    "renormalise": False,
    "scale": 1.0,
    "weighting": "softmax",
}


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
    """Routed experts of x [rows, D] -> [rows, D]. Every expert's bias counts with its weight, as its product does.

    Chosen by logit; weights are the softmax of the chosen logits among themselves.
    """
    logits = call(
        place,
        "moe.scores",
        mixture.router_scores,
        x,
        weight=layer.router,
        scoring="logit",
        router_bias=layer.router_bias,
    )
    ids, weights = call(place, "moe.route", mixture.route, logits, k=k, **ROUTING)
    count = layer.router.shape[0]
    pairs, order, active, offsets = call(place, "moe.dispatch", mixture.dispatch, x, ids=ids, experts=count)
    own = {name: getattr(layer, name)[active] for name in ("w1", "w3", "w2", "b1", "b3", "b2")}
    own |= {"activation": ACTIVATION, "limit": limit, "alpha": alpha}
    y = call(place, "moe.experts", mixture.experts, pairs, offsets=offsets, **own)
    return call(place, "moe.combine", mixture.combine, y, order=order, weights=weights)
