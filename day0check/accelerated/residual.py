"""The residual spine of a step: what a sublayer reads and where its output goes (model.md 2.7)."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from day0check.accelerated.ops.arithmetic import wide
from day0check.accelerated.ops.spine import residual_add
from day0check.accelerated.weights import Mix, Model, Streams
from day0check.probe.recorder import Here
from day0check.probe.rows import RowMap
from reference.config import ModelConfig


class Spine(Protocol):
    def attention_input(self, at: Here, layer: int) -> Tensor: ...

    def add_attention(self, at: Here, layer: int, y: Tensor) -> None: ...

    def mlp_input(self, at: Here, layer: int) -> Tensor: ...

    def add_mlp(self, at: Here, layer: int, y: Tensor) -> None: ...

    def output(self, at: Here, wanted: Tensor, row_map: RowMap) -> Tensor: ...


class PlainSpine:
    """x + f(norm x)."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def attention_input(self, at: Here, layer: int) -> Tensor:
        return self.x

    def add_attention(self, at: Here, layer: int, y: Tensor) -> None:
        self.x = at("residual.add", self.x, site="attention", y=y)

    def mlp_input(self, at: Here, layer: int) -> Tensor:
        return self.x

    def add_mlp(self, at: Here, layer: int, y: Tensor) -> None:
        self.x = at("residual.add", self.x, site="mlp", y=y)

    def output(self, at: Here, wanted: Tensor, row_map: RowMap) -> Tensor:
        return self.x.index_select(0, wanted)


class AttentionSpine:
    """Block attention residuals: a bank of frozen blocks and a running partial sum.

    At every boundary the attention mix still sees the completed partial as its last source; then the partial is frozen
    and starts anew with that layer's attention output. The embedding is the first completed partial.
    """

    def __init__(self, x: Tensor, model: Model, config: ModelConfig) -> None:
        self.model, self.eps, self.block = model, config.eps, config.residual.block
        blocks = -(-len(config.layers) // self.block)
        # the partial's place lies before the bank, so that what a mix reads is one view and nothing is put together
        self.memory = x.new_empty(1 + blocks, *x.shape)
        self.bank = self.memory[1:]
        self.filled = 0
        self.partial: Tensor | None = x
        self.memory[0] = x

    def attention_input(self, at: Here, layer: int) -> Tensor:
        mixed = self._mix(at, "attention", self.model.layers[layer].attention_mix)
        if layer % self.block == 0:
            at("residual.store", self.bank, value=self.partial, slot=self.filled)
            self.filled += 1
            self.partial = None
        return mixed

    def add_attention(self, at: Here, layer: int, y: Tensor) -> None:
        self._add(at, "attention", y)

    def mlp_input(self, at: Here, layer: int) -> Tensor:
        return self._mix(at, "mlp", self.model.layers[layer].mlp_mix)

    def add_mlp(self, at: Here, layer: int, y: Tensor) -> None:
        self._add(at, "mlp", y)

    def output(self, at: Here, wanted: Tensor, row_map: RowMap) -> Tensor:
        sources = self._sources().index_select(0, wanted)
        mix = self.model.output_mix
        return at(
            "residual.mix",
            sources,
            site="output",
            row_map=row_map,
            norm_weight=mix.norm,
            proj=mix.proj,
            eps=self.eps,
        )

    def _add(self, at: Here, site: str, y: Tensor) -> None:
        if self.partial is not None and _nobody_sees_sums(at):
            self.partial = torch.add(self.partial, y, out=self.memory[0])  # the same sum, straight into its place
            return
        self.partial = y if self.partial is None else at("residual.add", self.partial, site=site, y=y)
        self.memory[0] = self.partial

    def _sources(self) -> Tensor:
        """[rows, n, D]: the partial, then the frozen blocks; a view."""
        return self.memory[: 1 + self.filled].transpose(0, 1)

    def _mix(self, at: Here, site: str, mix: Mix) -> Tensor:
        sources = self._sources()
        return at("residual.mix", sources, site=site, norm_weight=mix.norm, proj=mix.proj, eps=self.eps)


def _nobody_sees_sums(at: Here) -> bool:
    """Whether `residual.add` is this package's own and no observer is there for it."""
    recorder, operators = at.caller.recorder, at.caller.operators
    own = operators.get("residual.add", recorder.phase) is residual_add
    return own and not recorder.observers and recorder.heartbeat is None


class StreamsSpine:
    """mHC: `streams` [rows, N, D], all of them the embedding at first. A sublayer reads a sum of them; its output is
    spread over them while they are mixed. The coefficients of both come from the streams before the sublayer."""

    def __init__(self, x: Tensor, model: Model, config: ModelConfig) -> None:
        self.model, self.eps, self.settings = model, config.eps, config.residual
        self.streams = x.unsqueeze(1).repeat(1, config.residual.streams, 1)
        self._post: Tensor | None = None
        self._comb: Tensor | None = None

    def attention_input(self, at: Here, layer: int) -> Tensor:
        return self._collapse(at, "attention", self.model.layers[layer].attention_mix)

    def add_attention(self, at: Here, layer: int, y: Tensor) -> None:
        self._update(at, "attention", y)

    def mlp_input(self, at: Here, layer: int) -> Tensor:
        return self._collapse(at, "mlp", self.model.layers[layer].mlp_mix)

    def add_mlp(self, at: Here, layer: int, y: Tensor) -> None:
        self._update(at, "mlp", y)

    def output(self, at: Here, wanted: Tensor, row_map: RowMap) -> Tensor:
        streams = self.streams.index_select(0, wanted)
        mean = torch.full(streams.shape[:2], 1 / streams.shape[1], dtype=wide(streams).dtype, device=streams.device)
        return at("residual.collapse", streams, site="output", row_map=row_map, pre=mean)

    def _collapse(self, at: Here, site: str, p: Streams) -> Tensor:
        pre, self._post, self._comb = at(
            "residual.coefficients",
            self.streams,
            site=site,
            fn=p.fn,
            base=p.base,
            scale=p.scale,
            eps=self.eps,
            hc_eps=self.settings.hc_eps,
            iterations=self.settings.sinkhorn,
        )
        return at("residual.collapse", self.streams, site=site, pre=pre)

    def _update(self, at: Here, site: str, y: Tensor) -> None:
        self.streams = at("residual.update", self.streams, site=site, output=y, post=self._post, comb=self._comb)


def make_spine(x: Tensor, model: Model, config: ModelConfig) -> Spine:
    kind = config.residual.kind
    if kind == "plain":
        return PlainSpine(x)
    return AttentionSpine(x, model, config) if kind == "attention" else StreamsSpine(x, model, config)
