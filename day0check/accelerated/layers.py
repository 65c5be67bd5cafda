"""The sublayers of a decoder layer: KDA, MLA with or without the sparse index, dense MLP and mixture of experts.

Each takes the normed input [rows, D] and gives what the residual spine adds; every operator goes through the recorder.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from day0check.accelerated import indexer, records
from day0check.accelerated import weights as w
from day0check.accelerated.batch import Batch
from day0check.accelerated.cache import Caches
from day0check.accelerated.pools import PoolPlan, plan_pools
from day0check.accelerated.prefix_chunks import PrefixPlan, attend, plan_prefix
from day0check.accelerated.workspace import PARTS, Workspace
from day0check.probe.recorder import Caller, Here
from day0check.probe.registry import Whole
from day0check.probe.rows import RowMap
from reference.config import ModelConfig

if TYPE_CHECKING:
    from day0check.accelerated.parallel.ranks import Ranks
    from day0check.accelerated.parallel.spread import Spread


@dataclass
class Step:
    """What the sublayers of one step share. `picked` are the keys chosen by the latest layer that has an index of its
    own; `slots` where this step's latents and index keys go, `plan_slots` where the keys of pools go."""

    config: ModelConfig
    caches: Caches
    workspace: Workspace
    caller: Caller
    batch: Batch
    slots: Tensor | None = None
    picked: Tensor | None = None
    plan: PoolPlan | None = None
    plan_slots: Tensor | None = None
    prefix: PrefixPlan | None = field(init=False)  # None where every prefix fits the workspace whole
    rotary: Tensor | None = None  # [rows, 3], where the model turns rows by more than their place in the sequence
    ranks: Ranks | None = None  # where the model is cut over several
    activation: dict = field(init=False)

    def __post_init__(self) -> None:
        a = self.config.activation
        self.prefix = plan_prefix(self.batch, tokens=self.caches.prefix.tokens, page=self.caches.page)
        self.activation = {"activation": a.kind, "beta": a.beta, "linear_beta": a.linear_beta, "limit": a.limit}

    def watched(self) -> bool:
        """Whether somebody looks at row maps."""
        return bool(self.caller.recorder.observers) or self.caller.recorder.heartbeat is not None

    def reduced(self, at: Here, y: Tensor, site: str) -> Tensor:
        """`y` [rows, D], which is this rank's part of a sum where sublayers are cut over ranks, as the sum: of this
        rank's rows where they are laid over ranks."""
        return y if self.ranks is None else self.ranks.reduced(at, y, site)

    def spread(self) -> Spread | None:
        """How the step's rows lie over ranks; None where every rank has all of them."""
        return None if self.ranks is None else self.ranks.spread

    def on_own_rows(self, at: Here) -> Here:
        """The place `at`, for calls on the rows that this rank has of the residual spine."""
        spread = self.spread()
        return at if spread is None else spread.at(at)

    def gathered(self, at: Here, x: Tensor, site: str) -> Tensor:
        """All rows of the step, from those that this rank has of the residual spine."""
        spread = self.spread()
        return x if spread is None else spread.gathered(at, x, site)

    def rotated(self, at: Here, x: Tensor, site: str, layout: str) -> Tensor:
        """`x` [rows, heads, d] rotated at the step's positions, or as it is when the model has no RoPE."""
        if layout == "none" or x.shape[-1] == 0:
            return x
        rope = self.config.rope
        turns = {"positions": self.batch.positions}
        if rope.sections is not None:
            turns = {"positions": self.rotary, "sections": rope.sections}
        return at("rope.apply", x, site=site, theta=rope.theta, layout=layout, yarn=rope.yarn, **turns)

    def reads_pages(self, attention: str) -> bool:
        """Whether the operator `attention`, on all keys, gets pages in place of keys: a kernel that covers the gather
        does, and needs no workspace for long prefixes, but where a schedule prescribes one they go through it."""
        prescribed = self.prefix is not None and self.caches.prefix.prescribed
        return not prescribed and "kv.gather" in self.caller.covers(attention)

    def page_slots(self) -> Tensor:
        """Flat slots of the step's rows, asked for once a step."""
        if self.slots is None:
            b = self.batch
            self.slots = self.caller.at("")(
                "kv.slots", b.table, owner=b.owner, positions=b.positions, page=self.caches.page
            )
        return self.slots

    def pool_plan(self) -> PoolPlan:
        """What the step does to the pools of index keys, worked out once a step."""
        if self.plan is None:
            i = self.config.index
            self.plan = plan_pools(self.batch, pool=i.pool, page=self.caches.index_page, overlap=i.overlap)
        return self.plan

    def pool_slots(self) -> Tensor:
        """Flat slots of the pools that the step closes, asked for once a step."""
        if self.plan_slots is None:
            plan = self.pool_plan()
            self.plan_slots = self.caller.at("")(
                "kv.slots",
                self.batch.table,
                site="pool",
                row_map=plan.closed,
                owner=plan.owner,
                positions=plan.number,
                page=self.caches.index_page,
            )
        return self.plan_slots


def kda(step: Step, at: Here, layer: int, x: Tensor, p: w.Kda) -> Tensor:
    """Kimi delta attention: chunked over the rows of a prompt, recurrent over single tokens."""
    k, batch, caches = step.config.kda, step.batch, step.caches
    raw = torch.cat([at("kda.project", x, site=site, weight=getattr(p, site)) for site in "qkv"], -1)
    conv_state = at("state.load", caches.conv[layer], site="conv", row_map=batch.requests, slots=batch.load_slots)
    mixed, conv_state = at("kda.conv", raw, weight=p.conv, state=conv_state, offsets=batch.offsets)
    at(
        "state.store",
        caches.conv[layer],
        site="conv",
        row_map=batch.requests,
        value=conv_state,
        slots=batch.store_slots,
    )
    q, key, v = mixed.view(x.shape[0], 3, k.heads, k.dim).unbind(1)
    if p.f_b is None:
        f = at("kda.project", x, site="alpha", weight=p.f_a).repeat_interleave(k.dim, 1)
    else:
        f = at("kda.project", at("kda.project", x, site="f_a", weight=p.f_a), site="f_b", weight=p.f_b)
    b = at("kda.project", x, site="beta", weight=p.beta)
    g, beta = at(
        "kda.gates",
        f.view(-1, k.heads, k.dim),
        b=b,
        a_log=p.a_log,
        dt_bias=p.dt_bias,
        lower_bound=k.gate_lower_bound,
    )
    state = at("state.load", caches.kda[layer], site="kda", row_map=batch.requests, slots=batch.load_slots)
    state = state.to(g.dtype)  # it may be kept narrower than it is computed with
    y, state = at(
        "kda.attention",
        q,
        k=key,
        v=v,
        g=g,
        beta=beta,
        state=state,
        offsets=batch.offsets,
        chunk=k.chunk if batch.phase == "prefill" else None,
    )
    at("state.store", caches.kda[layer], site="kda", row_map=batch.requests, value=state, slots=batch.store_slots)
    gate = x
    for site, weight in zip(("gate",) if len(p.gate) == 1 else ("gate_a", "gate_b"), p.gate, strict=True):
        gate = at("kda.project", gate, site=site, weight=weight)
    y = at("kda.output", y, gate=gate, norm_weight=p.norm, weight=p.output, eps=step.config.eps)
    return step.reduced(at, y, "attention")


def mla(step: Step, at: Here, layer: int, x: Tensor, p: w.Mla) -> Tensor:
    """Latent attention in its absorbed form, on all keys of a request or on those that the index picks."""
    config, m = step.config, step.config.mla
    rows, kind = x.shape[0], config.every_layer[layer]
    latent_query = x
    if p.query_down is not None:
        latent_query = at("mla.query", x, site="down", weight=p.query_down)
        latent_query = at("norm.rms", latent_query, site="q_latent", weight=p.query_norm, eps=m.latent_eps)
    q = at("mla.query", latent_query, site="up", weight=p.query_up).view(rows, m.heads, m.nope + m.rope)
    q_nope, q_rope = q.split((m.nope, m.rope), -1)
    latent, k_rope = at("mla.latent", x, weight=p.latent).split((m.kv_lora, m.rope), -1)
    latent = at("norm.rms", latent, site="kv_latent", weight=p.latent_norm, eps=m.latent_eps)
    q_rope = step.rotated(at, q_rope, "query", config.rope.layout)
    k_rope = step.rotated(at, k_rope.unsqueeze(1), "key", config.rope.layout).squeeze(1)
    slots = step.page_slots()
    value, pool = torch.cat((latent, k_rope), -1), step.caches.kv[layer]
    value = records.kept(at, value, pool, codes=m.kv_lora, scale=p.cache_scale)
    at("kv.write", pool, value=value, slots=slots)
    if kind == "dsa":
        step.picked = indexer.pick(step, at, layer, x, latent_query, p.index)
    absorbed = torch.cat((at("mla.absorb", q_nope, weight=p.absorb), q_rope), -1)
    attend = _dense if kind == "mla" else _sparse
    z = attend(step, at, layer, absorbed, p.cache_scale)
    y = at("mla.value", z, weight=p.value).flatten(1)
    gate = None if p.gate is None else at("mla.gate", x, weight=p.gate)
    return step.reduced(at, at("mla.output", y, gate=gate, weight=p.output), "attention")


def _sparse(step: Step, at: Here, layer: int, q: Tensor, cache_scale: Tensor | None) -> Tensor:
    """Attention of absorbed queries [rows, H, c + dr] on the picked latents: [rows, H, c]."""
    batch, pool = step.batch, step.caches.kv[layer]
    where = {"table": batch.table, "owner": batch.owner, "indices": step.picked}
    width = step.config.mla.kv_lora
    if "kv.gather" in step.caller.covers("dsa.attention"):
        keys = {"pool": pool, **where}
    else:
        rows = records.given_back(at, at("kv.gather", pool, **where), codes=width, scale=cache_scale)
        keys = {"keys": rows, "valid": step.picked >= 0}
    return at("dsa.attention", q, **keys, value_width=width, scale=step.config.softmax_scale())


def _dense(step: Step, at: Here, layer: int, q: Tensor, cache_scale: Tensor | None) -> Tensor:
    """Attention of absorbed queries [rows, H, c + dr] on every latent of the row's request: [rows, H, c]."""
    batch, pool, width, scale = step.batch, step.caches.kv[layer], step.config.mla.kv_lora, step.config.softmax_scale()

    def split(rows: Tensor) -> tuple[Tensor, Tensor]:
        form = {"codes": width, "scale": cache_scale, "row_map": batch.requests}
        latents = records.given_back(at, rows, **form).unsqueeze(2)
        return latents, latents[..., :width]

    if step.reads_pages("mla.attention"):
        keys = {"pool": pool, "table": batch.table, "value_width": width}
    elif step.prefix is not None:
        return attend(step, at, layer, q, split, scale=scale)
    else:
        where = {"table": batch.table, "owner": batch.every, "indices": batch.history}
        gathered = at("kv.gather", pool, row_map=batch.requests, **where)
        keys = dict(zip(("keys", "values"), split(gathered), strict=True))
    return at("mla.attention", q, **keys, owner=batch.owner, visible=batch.visible, scale=scale)


def feed_forward(step: Step, at: Here, x: Tensor, p: w.Mlp | w.Moe) -> Tensor:
    """The second sublayer: a dense MLP, or routed experts (in their latent) plus the shared one. `x` [rows, D] and what
    is given are the rows that this rank has of the residual spine."""
    if isinstance(p, w.Mlp):
        y = at("mlp.dense", step.gathered(at, x, "mlp_rows"), gate=p.gate, up=p.up, down=p.down, **step.activation)
        return step.reduced(at, y, "mlp")
    ranks, own = step.ranks, step.on_own_rows(at)
    exchanged = ranks is not None and ranks.exchanges()  # then nobody needs all rows for the routed part
    every = x if exchanged else step.gathered(at, x, "mlp_rows")
    if ranks is not None and ranks.placement is not None:
        y = ranks.routed(step, at, every, p)
    else:
        ids, weights, inner = route(step, at, every, p)
        y = step.reduced(at, combined(step, at, p, inner, ids, weights), "routed")
        y = routed_output(step, own, p, y)
    if p.shared is None:
        return y
    s, every = p.shared, step.gathered(at, x, "shared_rows") if exchanged else every
    shared = at("moe.shared", every, gate=s.gate, up=s.up, down=s.down, **step.activation)
    return own("residual.add", y, site="moe", y=step.reduced(at, shared, "shared"))


def route(step: Step, at: Here, x: Tensor, p: w.Moe, row_map: RowMap | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Experts [rows, k] of the rows `x`, their weights, and what is sent to them [rows, L]."""
    m = step.config.moe
    scores = at("moe.scores", x, row_map=row_map, weight=p.router, scoring=m.scoring)
    ids, weights = at(
        "moe.route",
        scores,
        row_map=row_map,
        bias=p.bias,
        k=m.topk,
        groups=m.groups,
        kept_groups=m.kept_groups,
        renormalise=m.renormalise,
        scale=m.scale,
    )
    return ids, weights, x if p.down is None else at("moe.down", x, row_map=row_map, weight=p.down)


def combined(step: Step, at: Here, p: w.Moe, inner: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Sums [rows, L] over the experts `ids` of each row, -1 for none, on the rows `inner` of the step."""
    m = step.config.moe
    pairs, order, active, offsets = at("moe.dispatch", inner, ids=ids, experts=m.experts)
    row_map = None
    if step.watched():
        row_map = step.batch.rows.take(order.div(m.topk, rounding_mode="floor").tolist())
    y = computed(step, at, p, pairs, active, offsets, row_map)
    return at("moe.combine", y, order=order, weights=weights)


def computed(
    step: Step, at: Here, p: w.Moe, pairs: Tensor, active: Tensor, offsets: Tensor, row_map: RowMap | None
) -> Tensor:
    """The output [pairs, L] of each pair's expert; those of expert active[a] are pairs[offsets[a] : offsets[a + 1]]."""
    held = active if step.ranks is None else step.ranks.numbers_of(active)
    whole = Whole(p, lambda: _every(step, at, p), held)
    prepared = step.caller.operators.prepares("moe.experts", step.batch.phase)
    if not prepared and p.w1.scale is not None:
        return _in_groups(step, at, p, pairs, held, offsets, row_map)
    # nobody reads the weights that a prepared kernel has in its own form, unless a judge looks on
    used = {} if prepared and not step.watched() else _active(step, at, p, held)
    return at("moe.experts", pairs, row_map=row_map, whole=whole, offsets=offsets, **used, **step.activation)


def _in_groups(
    step: Step, at: Here, p: w.Moe, pairs: Tensor, active: Tensor, offsets: Tensor, row_map: RowMap | None
) -> Tensor:
    """`computed` of packed experts, as many at a time as the workspace has room for in this phase: the next ones are
    decoded while the present ones are computed with."""
    space, results = step.workspace, []
    groups = space.groups(p, active.numel(), step.batch.phase)
    alone = len(groups) == 1
    bounds = [] if alone else offsets.tolist()

    def decoded(number: int) -> dict[str, Tensor]:
        with space.writing(number % 2, overlapped=not (alone or step.watched())):
            return _active(step, at, p, active[groups[number]], half=number % 2)

    upcoming = decoded(0)
    for number, some in enumerate(groups):
        used = upcoming
        upcoming = decoded(number + 1) if number + 1 < len(groups) else {}
        space.wait_for(number % 2)
        rows = slice(None) if alone else slice(bounds[some.start], bounds[some.stop])
        own_map = row_map if alone or row_map is None else row_map.take(range(rows.start, rows.stop))
        own = offsets if alone else offsets[some.start : some.stop + 1] - bounds[some.start]
        results.append(at("moe.experts", pairs[rows], row_map=own_map, offsets=own, **used, **step.activation))
    return results[0] if alone else torch.cat(results)


def routed_output(step: Step, at: Here, p: w.Moe, y: Tensor, row_map: RowMap | None = None) -> Tensor:
    """The routed part [rows, D] of the sublayer from the sums `y` [rows, L] over experts."""
    if p.norm is not None:
        y = at("norm.rms", y, site="routed_expert", row_map=row_map, weight=p.norm, eps=step.config.eps)
    return y if p.up is None else at("moe.up", y, row_map=row_map, weight=p.up)


def _active(step: Step, at: Here, p: w.Moe, active: Tensor, half: int = 0) -> dict[str, Tensor]:
    """Weights of the active experts: packed ones are decoded into the shared workspace, or a half of its ring."""
    if p.w1.scale is None:
        return {part: getattr(p, part).weight.index_select(0, active) for part in PARTS}
    found = {}
    for part, (payload, scale) in step.workspace.views(p, active.numel(), half).items():
        stack = getattr(p, part)
        found[part], found[f"{part}_scale"], inexact = at(
            "moe.convert",
            stack.weight,
            site=part,
            scale=stack.scale,
            experts=active,
            payload_out=payload,
            scale_out=scale,
        )
        step.workspace.inexact += inexact
    return found


def _every(step: Step, at: Here, p: w.Moe) -> dict[str, Tensor]:
    """The weights of all experts of a layer as `moe.experts` takes them, in memory of their own."""
    if p.w1.scale is None:
        return {part: getattr(p, part).weight for part in PARTS}
    found, convert = {}, step.caller.operators.get("moe.convert", step.batch.phase)
    for part in PARTS:
        stack = getattr(p, part)
        every = torch.arange(stack.weight.shape[0], device=stack.weight.device)
        found[part], found[f"{part}_scale"], _ = convert(stack.weight, scale=stack.scale, experts=every)
    return found
