"""A decode step of one row that nobody observes, a graph a sublayer: `run --compile` in float32 on a CPU.

Such a step is the latency of a single stream, and there what an operator costs is hardly its work: it is the call. The
step goes this way only where every operator that it stands for is this package's own, memory is laid out plainly and no
observer is there; else it goes operator by operator, as ever. What it gives is held against the observed run of the
same case, as everything that is not observed is (`checks/repeat.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from day0check.accelerated import one_row
from day0check.accelerated.batch import Batch
from day0check.accelerated.cache import Caches
from day0check.accelerated.engine import Engine
from day0check.accelerated.ops import attention, index, paging, rope
from day0check.accelerated.ops.experts import FEW_EXPERTS, lie_close
from day0check.accelerated.residual import AttentionSpine
from day0check.accelerated.weights import Kda, Layer, Mix, Mla, Mlp, Moe, Stack
from day0check.probe.recorder import Caller
from day0check.probe.registry import OwnedPool
from reference.config import ModelConfig

GRAPHS = ("kda", "mla_front", "mla_back", "dense", "moe")
STANDS_FOR = ("norm.", "residual.", "mlp.", "mla.", "rope.", "dsa.", "kv.", "index.", "state.", "kda.", "moe.")


class OneRowStep:
    """The step of `engine`, whose operators are those of `table`. `compile_` makes a graph of a function of `one_row`;
    without it they are called as they are."""

    def __init__(
        self, engine: Engine, table: Mapping[str, Callable[..., Any]], compile_: Callable[..., Any] | None = None
    ) -> None:
        self.engine, self.config = engine, engine.config
        self._own = {name: f for name, f in table.items() if name.startswith(STANDS_FOR)}
        self._graphs = {name: (compile_ or _as_it_is)(getattr(one_row, name)) for name in GRAPHS}
        self.possible = why_not(engine) == ""
        if self.possible:
            self._open_memory()
            a = self.config.activation
            self._activation = (a.kind, a.beta, a.linear_beta, a.limit)
            self._arguments = [self._feed_forward(layer) for layer in engine.model.layers]

    def _open_memory(self) -> None:
        """The residual spine's memory, made once: the step before left nothing in it that this one reads."""
        blocks = -(-len(self.config.layers) // self.config.residual.block)
        self.partial = torch.zeros(self.config.hidden)
        self.bank, self.shut = torch.zeros(blocks, self.config.hidden), torch.zeros(blocks)

    def __call__(self, caller: Caller, caches: Caches, batch: Batch) -> AttentionSpine | None:
        """The residual spine behind all layers of the step; None where it must go operator by operator."""
        if not (self.possible and self._alone(caller, batch) and _plain(caches, batch.parts[0].slot)):
            return None
        self.bank.zero_()  # a block that is not open counts zero times, and zero times a NaN would be one
        self.shut.fill_(float("-inf"))
        self.partial.copy_(self.engine.model.embed[batch.parts[0].tokens[0]])
        filled, here = 0, _Here(self.config, caches, batch)
        for number, layer in enumerate(self.engine.model.layers):
            spine = (self.partial, self.bank, self.shut)
            y = self._attention(here, number, layer, spine)
            if number % self.config.residual.block == 0:
                self.bank[filled].copy_(self.partial)
                self.shut[filled] = 0.0
                self.partial.copy_(y)
                filled += 1
            else:
                self.partial.add_(y)
            graph, arguments = self._arguments[number]
            self.partial.add_(self._graphs[graph](spine, _mix(layer.mlp_mix), layer.post_norm, *arguments)[0])
        return self._behind(filled)

    def _behind(self, filled: int) -> AttentionSpine:
        """The spine as the rest of the step reads it."""
        spine = AttentionSpine(self.partial.unsqueeze(0), self.engine.model, self.config)
        spine.bank[:filled] = self.bank[:filled].unsqueeze(1)
        spine.filled = filled
        return spine

    def _alone(self, caller: Caller, batch: Batch) -> bool:
        """Whether the step has one row behind others, and nobody looks or has put anything in an operator's place."""
        recorder, part = caller.recorder, batch.parts[0]
        if len(batch.rows) != 1 or len(batch.parts) != 1 or part.start == 0 or part.every_logits:
            return False
        if recorder.observers or recorder.heartbeat is not None or type(caller) is not Caller:
            return False
        operators = caller.operators
        return not operators.preparers and all(operators.get(n, "decode") is f for n, f in self._own.items())

    def _attention(self, here: _Here, number: int, layer: Layer, spine: one_row.Spine) -> Tensor:
        weights, mix, eps = layer.attention, _mix(layer.attention_mix), self.config.eps
        if isinstance(weights, Kda):
            p = weights
            return self._graphs["kda"](
                spine,
                mix,
                layer.input_norm,
                (p.q, p.k, p.v, p.beta),
                (p.f_a, p.f_b, p.a_log, p.dt_bias),
                p.gate,
                p.conv,
                (p.norm, p.output),
                here.caches.conv[number][here.slot],
                here.caches.kda[number][here.slot],
                self.config.kda.gate_lower_bound,
                eps,
            )[0]
        return self._latent_attention(here, number, weights, (spine, mix, layer.input_norm))

    def _latent_attention(self, here: _Here, number: int, p: Mla, entry: tuple[Any, ...]) -> Tensor:
        config, i = self.config, self.config.index
        own = p.index
        absorbed, kept, opened, found, _ = self._graphs["mla_front"](
            *entry,
            (p.query_down, p.query_norm, p.query_up),
            (p.latent, p.latent_norm),
            p.absorb,
            p.gate,
            None if own is None else (own.query, own.weights, own.key, own.norm_weight, own.norm_bias),
            here.turns(config.mla.rope, config.rope.layout),
            here.turns(0 if own is None else i.rope, "none" if own is None else i.rope_layout),
            (config.rope.layout, "none" if own is None else i.rope_layout),
            (config.eps, config.mla.latent_eps, 0.0 if own is None else i.key_norm_eps),
            0 if own is None else i.rope,
        )
        here.keep(here.caches.kv[number], kept)
        if found is not None:
            queries, shares, key = found
            here.keep(here.caches.index[number], key)
            here.pick(here.caches.index[number], queries, shares, k=i.topk)
        z = here.attend(number, absorbed.unsqueeze(0))
        return self._graphs["mla_back"](z, p.value, opened, p.output)[0]

    def _feed_forward(self, layer: Layer) -> tuple[str, tuple[Any, ...]]:
        """Which graph the second sublayer is, and what it takes behind the spine, the mix and the norm."""
        p, eps = layer.mlp, self.config.eps
        if isinstance(p, Mlp):
            return "dense", ((p.gate, p.up, p.down), self._activation, eps)
        m, s = self.config.moe, p.shared
        return "moe", (
            (p.router, p.bias),
            (p.down, p.norm, p.up),
            tuple((stack.weight, stack.scale) for stack in (p.w1, p.w3, p.w2)),
            None if s is None else (s.gate, s.up, s.down),
            (m.topk, m.groups, m.kept_groups, m.renormalise, m.scale, m.scoring),
            self._activation,
            eps,
        )


class _Here:
    """Where the one row stands: its place in the caches, and the keys that the latest index picked."""

    def __init__(self, config: ModelConfig, caches: Caches, batch: Batch) -> None:
        part = batch.parts[0]
        self.config, self.caches, self.batch, self.slot = config, caches, batch, part.slot
        self.seen = part.start + 1
        self.page, self.place = part.table[part.start // caches.page], part.start % caches.page
        self.picked: Tensor | None = None

    def turns(self, width: int, layout: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines [1, width / 2] of the row's angles."""
        r = self.config.rope
        cos, sin = rope.turns(self.batch.positions, 0 if layout == "none" else width // 2, r.theta, r.yarn)
        return cos[0], sin[0]

    def keep(self, pool: Tensor, row: Tensor) -> None:
        pool[self.page, self.place].copy_(row)

    def every(self, pool: Tensor) -> Tensor:
        """What `pool` holds of the request, [n, width]."""
        return pool.index_select(0, self.batch.table[0]).flatten(0, 1)[: self.seen]

    def pick(self, pool: Tensor, queries: Tensor, shares: Tensor, *, k: int) -> None:
        keys = self.every(pool).unsqueeze(0)
        scores = index.score(
            queries.unsqueeze(0), weights=shares.unsqueeze(0), keys=keys, owner=self.batch.owner, scale=1.0
        )
        self.picked = index.select(scores, k=k, visible=self.batch.visible)

    def attend(self, number: int, q: Tensor) -> Tensor:
        """What the absorbed query [1, H, c + dr] finds in the latents of the layer, [H, c]."""
        pool, width, scale = self.caches.kv[number], self.config.mla.kv_lora, self.config.softmax_scale()
        if self.config.every_layer[number] == "mla":
            keys = self.every(pool)[None, :, None]
            own = {"owner": self.batch.owner, "visible": self.batch.visible}
            return attention.attention(q, keys=keys, values=keys[..., :width], **own, scale=scale)[0]
        rows = paging.gather(pool, table=self.batch.table, owner=self.batch.owner, indices=self.picked)
        return attention.sparse_attention(q, keys=rows, valid=self.picked >= 0, value_width=width, scale=scale)[0]


def why_not(engine: Engine) -> str:
    """Why the steps of `engine` must go operator by operator; "" where one row need not."""
    config, layers = engine.config, engine.model.layers
    if engine.device.type != "cpu" or engine.dtype != torch.float32:
        return "not in float32 on a CPU"
    if engine.ranks is not None or engine.layouts:
        return "cut over ranks, or memory of another's layout"
    if config.residual.kind != "attention" or config.rope.sections is not None:
        return "another residual spine or rotation"
    if not all(isinstance(layer.attention, Kda | Mla) for layer in layers):
        return "another attention"
    i = config.index
    if i is not None and (i.pool != 1 or i.select != "topk"):
        return "another index"
    experts = [layer.mlp for layer in layers if isinstance(layer.mlp, Moe)]
    if experts and (config.moe.experts > FEW_EXPERTS or config.moe.scoring not in ("sigmoid", "softmax")):
        return "more experts than are chosen in a graph, or other scores"
    if not all(_exact(stack) for moe in experts for stack in (moe.w1, moe.w3, moe.w2)):
        return "experts whose FP8 form is not exact"
    return ""


def _exact(stack: Stack) -> bool:
    """Whether the matrices mean the same without their way through FP8."""
    return stack.scale is None or (lie_close(stack.scale) and bool(stack.scale.amin() >= 1))


def _plain(caches: Caches, slot: int) -> bool:
    """Whether all memory is plain float32 tensors, and a state lies in one piece."""
    pools = [*caches.kv.values(), *caches.index.values()]
    states = [*caches.conv.values(), *caches.kda.values()]
    if any(isinstance(pool, OwnedPool) or pool.dtype != torch.float32 for pool in (*pools, *states)):
        return False
    return all(state[slot].is_contiguous() for state in states)


def _mix(mix: Mix) -> one_row.Mixed:
    return mix.norm, mix.proj


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function
