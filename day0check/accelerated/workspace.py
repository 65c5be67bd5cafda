"""The one FP8 workspace that all MoE layers share: MXFP4 experts are decoded into it right before they are used."""

from __future__ import annotations

import torch
from torch import Tensor

from day0check.accelerated.ops.experts import SCALE_COLUMNS
from day0check.accelerated.weights import Model, Moe, Stack

PARTS = ("w1", "w3", "w2")


class Workspace:
    """Payload and scale memory for the largest set of active experts of one layer.

    `views(moe, active)` cuts [A, N, K] payload and [A, N, ceil(K/128)] scale views for w1, w3 and w2 out of it; they
    are valid until the next layer takes its own.
    """

    def __init__(self, model: Model, device: torch.device) -> None:
        layers = [layer.mlp for layer in model.layers if isinstance(layer.mlp, Moe)]
        packed = [[getattr(moe, part) for part in PARTS] for moe in layers if moe.w1.scale is not None]
        elements = max((sum(_elements(s) for s in stacks) for stacks in packed), default=0)
        scales = max((sum(_scales(s) for s in stacks) for stacks in packed), default=0)
        self.payload = torch.empty(elements, dtype=torch.float8_e4m3fn, device=device)
        self.scale = torch.empty(scales, dtype=torch.float32, device=device)

    def views(self, moe: Moe, active: int) -> dict[str, tuple[Tensor, Tensor]]:
        at = at_scale = 0
        found = {}
        for part in PARTS:
            stack: Stack = getattr(moe, part)
            shape, scale_shape = (active, stack.rows, stack.columns), (active, stack.rows, _blocks(stack))
            size, scale_size = active * stack.rows * stack.columns, active * stack.rows * _blocks(stack)
            found[part] = (
                self.payload[at : at + size].view(shape),
                self.scale[at_scale : at_scale + scale_size].view(scale_shape),
            )
            at, at_scale = at + size, at_scale + scale_size
        return found


def _blocks(stack: Stack) -> int:
    return -(-stack.columns // SCALE_COLUMNS)


def _elements(stack: Stack) -> int:
    return stack.weight.shape[0] * stack.rows * stack.columns


def _scales(stack: Stack) -> int:
    return stack.weight.shape[0] * stack.rows * _blocks(stack)
