"""The one FP8 workspace that all MoE layers share: MXFP4 experts are decoded into it right before they are used.

A prompt needs most experts of a layer and takes the workspace whole. A decode step needs few, and takes it as a ring
of two halves of a few tiles each, one tile an expert: while the experts of one half are computed with, the next are
decoded into the other, on a stream of its own where the device has streams. A half is written only after the
computation that read it last, and read only after it was written: events say so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from day0check.accelerated.ops.experts import SCALE_COLUMNS
from day0check.accelerated.weights import Model, Moe, Stack

PARTS = ("w1", "w3", "w2")
VIEWS = 4096  # that are remembered: a decode step cuts the same ones again and again
RING_BYTES = 32 << 20  # of both halves: what second-level caches of devices and third-level ones of CPUs hold


class Workspace:
    """Payload and scale memory for all experts of the largest layer, allocated once.

    `views(moe, count, half)` cuts [count, N, K] payload and [count, N, ceil(K/128)] scale views for w1, w3 and w2 out
    of it; they are valid until the same memory is taken again. `inexact` int64 [1] counts the elements, of all that was
    ever decoded, that E4M3 could not hold.
    """

    def __init__(self, model: Model, device: torch.device, *, ring_bytes: int = RING_BYTES) -> None:
        every = model.layers if model.draft is None else (*model.layers, model.draft.layer)
        layers = [layer.mlp for layer in every if isinstance(layer.mlp, Moe)]
        packed = [[getattr(moe, part) for part in PARTS] for moe in layers if moe.w1.scale is not None]
        elements = max((sum(_elements(s) for s in stacks) for stacks in packed), default=0)
        scales = max((sum(_scales(s) for s in stacks) for stacks in packed), default=0)
        self.ring_bytes = ring_bytes
        self.payload = torch.empty(elements, dtype=torch.float8_e4m3fn, device=device)
        self.scale = torch.empty(scales, dtype=torch.float32, device=device)
        self.inexact = torch.zeros(1, dtype=torch.int64, device=device)
        self._side = torch.Stream(device) if device.type == "cuda" else None
        self._written: dict[int, torch.Event] = {}
        self._views: dict[tuple[int, int, int], tuple[Moe, dict[str, tuple[Tensor, Tensor]]]] = {}

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.payload, self.scale, self.inexact))

    def half_tiles(self, moe: Moe) -> int:
        """Experts of `moe` that half of the ring holds, one at least; all of them when the ring would hold all."""
        experts = moe.w1.weight.shape[0]
        tile = sum(_elements(getattr(moe, part)) for part in PARTS) // max(1, experts)
        tiles = max(1, self.ring_bytes // 2 // max(1, tile))
        return tiles if 2 * tiles <= experts else experts

    def groups(self, moe: Moe, active: int, phase: str) -> list[slice]:
        """Which of the `active` experts are decoded at a time."""
        size = self.half_tiles(moe) if phase == "decode" else max(1, active)
        return [slice(start, min(start + size, active)) for start in range(0, active, size)] or [slice(0, 0)]

    def views(self, moe: Moe, count: int, half: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
        key = (id(moe), count, half)
        known = self._views.get(key)
        if known is not None and known[0] is moe:
            return known[1]
        if len(self._views) >= VIEWS:
            self._views.clear()
        self._views[key] = (moe, self._cut(moe, count, half))
        return self._views[key][1]

    def _cut(self, moe: Moe, count: int, half: int) -> dict[str, tuple[Tensor, Tensor]]:
        tiles = half * self.half_tiles(moe)
        at = tiles * sum(getattr(moe, part).rows * getattr(moe, part).columns for part in PARTS)
        at_scale = tiles * sum(getattr(moe, part).rows * _blocks(getattr(moe, part)) for part in PARTS)
        found = {}
        for part in PARTS:
            stack: Stack = getattr(moe, part)
            shape, scale_shape = (count, stack.rows, stack.columns), (count, stack.rows, _blocks(stack))
            size, scale_size = count * stack.rows * stack.columns, count * stack.rows * _blocks(stack)
            found[part] = (
                self.payload[at : at + size].view(shape),
                self.scale[at_scale : at_scale + scale_size].view(scale_shape),
            )
            at, at_scale = at + size, at_scale + scale_size
        return found

    @contextlib.contextmanager
    def writing(self, half: int, *, overlapped: bool) -> Iterator[None]:
        """Decoding into a half, after all that was asked for so far; `overlapped`: beside what is asked for next, where
        the device has a stream for it."""
        self._written.pop(half, None)
        if self._side is None or not overlapped:
            yield
            return
        self._side.wait_stream(torch.accelerator.current_stream(self.payload.device))
        with self._side:
            yield
        self._written[half] = self._side.record_event()

    def wait_for(self, half: int) -> None:
        """What is asked for from now on comes after the decoding into a half."""
        if half in self._written:
            torch.accelerator.current_stream(self.payload.device).wait_event(self._written[half])


def _blocks(stack: Stack) -> int:
    return -(-stack.columns // SCALE_COLUMNS)


def _elements(stack: Stack) -> int:
    return stack.weight.shape[0] * stack.rows * stack.columns


def _scales(stack: Stack) -> int:
    return stack.weight.shape[0] * stack.rows * _blocks(stack)
