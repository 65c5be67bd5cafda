"""The sublayers of a decoder layer as sequences of operator calls (model.md 2.3 to 2.6). T rows of one request.

Every function takes a `Here`: the place it is at, the call that operators go through, and the weights under it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from reference import attention as att
from reference import grouped
from reference import kda as delta
from reference import moe as mixture
from reference.config import ModelConfig
from reference.linear import linear, per_head
from reference.norm import rms_norm
from reference.pooling import pool_members
from reference.records import as_claimed, as_read, record
from reference.residual import add
from reference.rope import apply_rope


class Call(Protocol):
    """What every operator of the reference goes through; `just_call` is the plain one."""

    def __call__(
        self, place: str, operator: str, function: Callable[..., Any], *args: Any, site: str = "", **kwargs: Any
    ) -> Any: ...


def just_call(
    place: str, operator: str, function: Callable[..., Any], *args: Any, site: str = "", **kwargs: Any
) -> Any:
    """Calls the function and nothing else."""
    return function(*args, **kwargs)


class Weights(Protocol):
    """Where a model's tensors come from, by canonical name, decoded and on the device."""

    def __call__(self, name: str) -> Tensor: ...

    def experts(self, prefix: str, w: str, *, active: tuple[int, ...]) -> Any:
        """[A, rows, columns] of the given experts; decoded one by one when indexed, where memory calls for it."""


@dataclass(frozen=True)
class Here:
    """A place of the model: `here(operator, function, x, site=..., **arguments)` and `here.weight("q_proj")`."""

    place: str
    prefix: str  # of the canonical names under this place
    config: ModelConfig
    weights: Weights
    call: Call

    def __call__(self, operator: str, function: Callable[..., Any], *args: Any, site: str = "", **kwargs: Any) -> Any:
        return self.call(self.place, operator, function, *args, site=site, **kwargs)

    def tensor(self, name: str) -> Tensor:
        return self.weights(self.prefix + name)

    def weight(self, name: str) -> Tensor:
        return self.tensor(f"{name}.weight")

    def norm(self, x: Tensor, name: str, *, site: str, eps: float | None = None) -> Tensor:
        eps = self.config.eps if eps is None else eps
        return self("norm.rms", rms_norm, x, weight=self.weight(name), eps=eps, site=site)

    def activation(self) -> dict[str, Any]:
        a = self.config.activation
        return {"activation": a.kind, "beta": a.beta, "linear_beta": a.linear_beta, "limit": a.limit}


# ----------------------------------------------------------------------------------------------------------- caches


@dataclass
class KdaCache:
    """`conv` [1, W-1, C] raw rows before the convolution; `state` [1, H, dk, dv]."""

    conv: Tensor
    state: Tensor


@dataclass
class LatentCache:
    """`latent` [n, c + dr] after norm and rotation; `index_keys` [n, dI], one per token or per whole pool; `unpooled`
    keys and gates [m, lanes, dI] of the pool that is not whole yet, behind those of the pool before it where pools
    overlap; `selected` int32 [T, k] of the last rows. Grouped-query attention keeps its keys and values in place of the
    latent, [n, 2 Hk d]."""

    latent: Tensor
    index_keys: Tensor | None = None
    unpooled: tuple[Tensor, Tensor] | None = None
    selected: Tensor | None = None


def fresh_cache(config: ModelConfig, layer: int, *, like: Tensor) -> KdaCache | LatentCache:
    """An empty cache in the dtype (the KDA state in at least float32) and on the device of `like`."""
    if config.every_layer[layer] == "kda":
        k = config.kda
        state = torch.float64 if like.dtype == torch.float64 else torch.float32
        return KdaCache(
            conv=like.new_zeros(1, k.conv - 1, 3 * k.heads * k.dim),
            state=like.new_zeros(1, k.heads, k.dim, k.dim, dtype=state),
        )
    index = like.new_zeros(0, config.index.dim) if config.every_layer[layer] == "dsa" else None
    pools = index is not None and config.index.pool > 1
    latent = like.new_zeros(0, config.cache_width(layer))
    unpooled = like.new_zeros(0, config.index.lanes, config.index.dim) if pools else None
    return LatentCache(latent, index, (unpooled, unpooled) if pools else None)


# -------------------------------------------------------------------------------------------------------------- KDA


def kda(here: Here, x: Tensor, cache: KdaCache, *, chunk: int | None) -> Tensor:
    """Kimi delta attention of x [T, D] after what `cache` remembers; the cache moves on. `chunk` None: recurrent."""
    k, rows = here.config.kda, x.shape[0]
    offsets = torch.tensor([0, rows], device=x.device)

    def project(source: Tensor, name: str, site: str) -> Tensor:
        return here("kda.project", linear, source, weight=here.weight(f"self_attn.{name}"), site=site)

    raw = torch.cat([project(x, f"{n}_proj", n) for n in "qkv"], dim=-1)
    kernel = torch.cat([here.weight(f"self_attn.{n}_conv1d") for n in "qkv"]).squeeze(1)
    mixed, cache.conv = here("kda.conv", delta.conv, raw, weight=kernel, state=cache.conv, offsets=offsets)
    q, key, v = (part.reshape(rows, k.heads, k.dim) for part in mixed.split(k.heads * k.dim, dim=-1))
    if k.decay == "per_head":
        f = project(x, "a_proj", "alpha")[..., None].expand(-1, -1, k.dim)
    else:
        f = project(project(x, "f_a_proj", "f_a"), "f_b_proj", "f_b").reshape(rows, k.heads, k.dim)
    g, beta = here(
        "kda.gates",
        delta.gates,
        f,
        b=project(x, "b_proj", "beta"),
        a_log=here.tensor("self_attn.A_log"),
        dt_bias=here.tensor("self_attn.dt_bias").reshape(k.heads, k.dim),
        lower_bound=k.gate_lower_bound,
    )
    o, cache.state = here(
        "kda.attention", delta.attention, q, k=key, v=v, g=g, beta=beta, state=cache.state, offsets=offsets, chunk=chunk
    )
    if k.full_rank_gate:
        gate = project(x, "g_proj", "gate")
    else:
        gate = project(project(x, "g_a_proj", "gate_a"), "g_b_proj", "gate_b")
    return here(
        "kda.output",
        delta.output,
        o,
        gate=gate,
        norm_weight=here.weight("self_attn.o_norm"),
        weight=here.weight("self_attn.o_proj"),
        eps=here.config.eps,
    )


# --------------------------------------------------------------------------------------------------------- MLA, DSA


def full_attention(
    here: Here,
    x: Tensor,
    cache: LatentCache,
    *,
    kind: str,
    form: str,
    shared_selection: Tensor | None,
    rotary: Tensor | None = None,
) -> Tensor:
    """Multi-head latent attention of x [T, D] over the cache and itself; the cache grows by T rows.

    `kind` "mla": every visible key; "dsa": the indexer's choice; "dsa_shared": `shared_selection`, the choice of the
    last layer that made one. `form`: "absorbed" works on the latent rows, "plain" on expanded keys and values; layers
    that choose keys are always absorbed, as in every sparse kernel (one key head). `rotary` [T, 3]: what the rows are
    turned by, where that is not their position in the sequence.
    """
    m, before = here.config.mla, cache.latent.shape[0]
    positions = torch.arange(before, before + x.shape[0], device=x.device)
    rotary = positions if rotary is None else rotary
    q, query_latent = _query(here, x)
    q_nope, q_rope = q.split([m.nope, m.rope], dim=-1)
    latent, key_rope = here("mla.latent", linear, x, weight=here.weight("self_attn.kv_a_proj_with_mqa")).split(
        [m.kv_lora, m.rope], dim=-1
    )
    latent = here.norm(latent, "self_attn.kv_a_layernorm", site="kv_latent", eps=m.latent_eps)
    q_rope = _rotate(here, q_rope, rotary, site="query", layout=here.config.rope.layout)
    key_rope = _rotate(here, key_rope[:, None], rotary, site="key", layout=here.config.rope.layout)[:, 0]
    row = torch.cat([latent if m.cache_scale else here("kv.record", record, latent), key_rope], dim=-1)
    if m.cache_scale:
        scale = here.tensor("self_attn.k_scale")
        row = here("kv.dequantise", as_read, here("kv.quantise", as_claimed, row, scale=scale), scale=scale)
    cache.latent = torch.cat([cache.latent, row])
    cache.selected = None if kind == "mla" else shared_selection
    if kind == "dsa":
        cache.selected = _choose_keys(here, x, query_latent, cache, positions=positions, rotary=rotary)
    if form not in ("absorbed", "plain"):
        raise ValueError(f"form {form!r} of the attention is neither 'absorbed' nor 'plain'")
    attend = _plain if form == "plain" and kind == "mla" else _absorbed
    o = attend(here, q_nope, q_rope, cache, positions=positions)
    gate = here("mla.gate", linear, x, weight=here.weight("self_attn.g_proj")) if m.gate else None
    return here("mla.output", att.gated_output, o.flatten(1), gate=gate, weight=here.weight("self_attn.o_proj"))


def _query(here: Here, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Queries [T, H, dn + dr], and the normed query latent [T, q_lora] that the indexer reads."""
    m = here.config.mla
    if m.q_lora is None:
        q = here("mla.query", linear, x, weight=here.weight("self_attn.q_proj"), site="up")
        return q.unflatten(-1, (m.heads, m.nope + m.rope)), None
    latent = here("mla.query", linear, x, weight=here.weight("self_attn.q_a_proj"), site="down")
    latent = here.norm(latent, "self_attn.q_a_layernorm", site="q_latent", eps=m.latent_eps)
    q = here("mla.query", linear, latent, weight=here.weight("self_attn.q_b_proj"), site="up")
    return q.unflatten(-1, (m.heads, m.nope + m.rope)), latent


def _rotate(here: Here, x: Tensor, positions: Tensor, *, site: str, layout: str) -> Tensor:
    """x [T, heads, d] rotated; as it is when nothing is to be rotated."""
    if layout == "none" or x.shape[-1] == 0:
        return x
    rope = here.config.rope
    more = {} if rope.sections is None else {"sections": rope.sections}
    return here(
        "rope.apply",
        apply_rope,
        x,
        positions=positions,
        theta=rope.theta,
        layout=layout,
        yarn=rope.yarn,
        site=site,
        **more,
    )


def _choose_keys(
    here: Here, x: Tensor, query_latent: Tensor, cache: LatentCache, *, positions: Tensor, rotary: Tensor
) -> Tensor:
    """The lightning indexer: positions int32 [T, k] that each row attends to, -1 for none; its key cache grows."""
    i = here.config.index

    def rotate_first(heads: Tensor, site: str) -> Tensor:
        turned = _rotate(here, heads[..., : i.rope], rotary, site=site, layout=i.rope_layout)
        return torch.cat([turned, heads[..., i.rope :]], dim=-1)

    q = here("dsa.index_query", linear, query_latent, weight=here.weight("self_attn.indexer.wq_b"))
    q = rotate_first(q.unflatten(-1, (i.heads, i.dim)), "index_query")
    weights = here("dsa.index_weights", att.index_weights, x, weight=here.weight("self_attn.indexer.weights_proj"))
    key = here(
        "dsa.index_key",
        att.index_key,
        x,
        weight=here.weight("self_attn.indexer.wk"),
        norm_weight=here.weight("self_attn.indexer.k_norm"),
        norm_bias=here.tensor("self_attn.indexer.k_norm.bias"),
        eps=i.key_norm_eps,
    )
    key = rotate_first(key.unflatten(-1, (i.lanes, i.dim)), "index_key")
    _remember_keys(here, x, key, cache)
    scores = here(
        "dsa.score",
        att.index_scores,
        q,
        weights=weights,
        keys=cache.index_keys[None],
        owner=torch.zeros_like(positions),
        scale=i.dim**-0.5,
    )
    threshold = i.threshold if i.select == "threshold" else None
    visible = (positions + 1) // i.pool
    selected = here("dsa.select", att.select, scores, k=i.topk // i.pool, visible=visible, threshold=threshold)
    if i.pool == 1:
        return selected
    return here("dsa.expand", att.expand_pools, selected, visible=positions + 1, pool=i.pool, tail=i.pool_tail)


def _remember_keys(here: Here, x: Tensor, key: Tensor, cache: LatentCache) -> None:
    """Adds the index keys [T, lanes, dI] of rows x to the cache; with pools, one key for each that is whole now."""
    i = here.config.index
    if i.pool == 1:
        cache.index_keys = torch.cat([cache.index_keys, here("index.record", record, key[:, 0])])
        return
    name = "self_attn.indexer.index_kpool_compress"
    gate = here("dsa.pool_gate", linear, x, weight=here.tensor(f"{name}_gate"))
    gate = gate.unflatten(-1, (i.lanes, i.dim))
    keys, gates = (torch.cat([old, new]) for old, new in zip(cache.unpooled, (key, gate), strict=True))
    previous = i.pool if i.overlap and len(cache.index_keys) else 0
    whole = (len(keys) - previous) // i.pool * i.pool
    if not whole:
        cache.unpooled = keys, gates
        return
    left = previous + whole - (i.pool if i.overlap else 0)
    cache.unpooled = keys[left:], gates[left:]
    pooled = here(
        "dsa.pool_key",
        att.pool_key,
        pool_members(keys, pool=i.pool, previous=previous, absent=0.0),
        gates=pool_members(gates, pool=i.pool, previous=previous, absent=-torch.inf),
        ape=here.tensor(f"{name}_ape"),
    )
    cache.index_keys = torch.cat([cache.index_keys, here("index.record", record, pooled)])


def _gather(rows: Tensor, selected: Tensor) -> Tensor:
    return rows[selected.clamp(min=0).long()]


def _absorbed(here: Here, q_nope: Tensor, q_rope: Tensor, cache: LatentCache, *, positions: Tensor) -> Tensor:
    """Attention on the latent rows themselves, one key head: [T, H, dv]."""
    m, scale = here.config.mla, here.config.softmax_scale()
    up = here.weight("self_attn.kv_b_proj").unflatten(0, (m.heads, m.nope + m.v))
    q = here("mla.absorb", per_head, q_nope, weight=up[:, : m.nope])
    q = torch.cat([q, q_rope], dim=-1)
    if cache.selected is not None:
        keys = _gather(cache.latent, cache.selected)
        valid = cache.selected >= 0
        z = here("dsa.attention", att.sparse_attention, q, keys=keys, valid=valid, value_width=m.kv_lora, scale=scale)
    else:
        z = here(
            "mla.attention",
            att.attention,
            q,
            keys=cache.latent[None, :, None],
            values=cache.latent[None, :, None, : m.kv_lora],
            owner=torch.zeros_like(positions),
            visible=positions + 1,
            scale=scale,
        )
    return here("mla.value", per_head, z, weight=up[:, m.nope :].transpose(1, 2))


def _plain(here: Here, q_nope: Tensor, q_rope: Tensor, cache: LatentCache, *, positions: Tensor) -> Tensor:
    """Attention on keys and values expanded from the latent rows, a key head per head: [T, H, dv]."""
    m, scale = here.config.mla, here.config.softmax_scale()
    latent, key_rope = cache.latent.split([m.kv_lora, m.rope], dim=-1)
    expanded = here("mla.expand", linear, latent, weight=here.weight("self_attn.kv_b_proj"))
    k_nope, v = expanded.unflatten(-1, (m.heads, m.nope + m.v)).split([m.nope, m.v], dim=-1)
    k = torch.cat([k_nope, key_rope[:, None].expand(-1, m.heads, -1)], dim=-1)
    return here(
        "mla.attention",
        att.attention,
        torch.cat([q_nope, q_rope], dim=-1),
        keys=k[None],
        values=v[None],
        owner=torch.zeros_like(positions),
        visible=positions + 1,
        scale=scale,
    )


def grouped_attention(here: Here, x: Tensor, cache: LatentCache, *, rotary: Tensor | None = None) -> Tensor:
    """Grouped-query attention of x [T, D] over the cache and itself; the cache grows by T rows. `rotary` as there."""
    g, rows, before = here.config.gqa, x.shape[0], cache.latent.shape[0]
    positions = torch.arange(before, before + rows, device=x.device)
    turned = {"positions": positions if rotary is None else rotary, "layout": here.config.rope.layout}

    def heads(name: str, count: int, site: str | None) -> Tensor:
        y = here("gqa.project", linear, x, weight=here.weight(f"self_attn.{name}_proj"), site=name)
        y = y.unflatten(-1, (count, g.dim))
        if site is None:
            return y
        weight = here.weight(f"self_attn.{name}_norm").unflatten(0, (count, g.dim))
        y = here("norm.rms", rms_norm, y, weight=weight, eps=here.config.eps, site=site)
        return _rotate(here, y, site=site, **turned)

    q, k, v = heads("q", g.heads, "query"), heads("k", g.kv_heads, "key"), heads("v", g.kv_heads, None)
    cache.latent = torch.cat([cache.latent, torch.cat([k, v], dim=-1).flatten(1)])
    keys, values = cache.latent.unflatten(-1, (g.kv_heads, 2 * g.dim)).split(g.dim, dim=-1)
    owner = torch.zeros_like(positions)
    seen = {"keys": keys[None], "values": values[None], "owner": owner, "visible": positions + 1, "scale": g.scale}
    o = here("gqa.attention", grouped.grouped_attention, q, **seen)
    return here("gqa.output", linear, o.flatten(1), weight=here.weight("self_attn.o_proj"))


# ----------------------------------------------------------------------------------------------------- feed forward


def dense_mlp(here: Here, x: Tensor) -> Tensor:
    return here("mlp.dense", mixture.mlp, x, **_mlp_weights(here, "mlp"), **here.activation())


def _mlp_weights(here: Here, prefix: str) -> dict[str, Tensor]:
    return {part: here.weight(f"{prefix}.{part}_proj") for part in ("gate", "up", "down")}


def moe(here: Here, x: Tensor) -> Tensor:
    """Routed and shared experts of x [T, D]. The router and the shared expert read x, never the latent."""
    m, at = here.config.moe, "block_sparse_moe"
    scores = here("moe.scores", mixture.router_scores, x, weight=here.weight(f"{at}.gate"), scoring=m.scoring)
    ids, weights = here(
        "moe.route",
        mixture.route,
        scores,
        bias=here.tensor(f"{at}.gate.e_score_correction_bias"),
        k=m.topk,
        groups=m.groups,
        kept_groups=m.kept_groups,
        renormalise=m.renormalise,
        scale=m.scale,
    )
    inner = here("moe.down", linear, x, weight=here.weight(f"{at}.routed_expert_down_proj")) if m.latent else x
    pairs, order, active, offsets = here("moe.dispatch", mixture.dispatch, inner, ids=ids, experts=m.experts)
    chosen = tuple(active.tolist())
    own = {w: here.weights.experts(f"{here.prefix}{at}.experts", w, active=chosen) for w in ("w1", "w3", "w2")}
    y = here("moe.experts", mixture.experts, pairs, offsets=offsets, **own, **here.activation())
    routed = here("moe.combine", mixture.combine, y, order=order, weights=weights)
    if m.latent and m.latent_norm:
        routed = here.norm(routed, f"{at}.routed_expert_norm", site="routed_expert")
    if m.latent:
        routed = here("moe.up", linear, routed, weight=here.weight(f"{at}.routed_expert_up_proj"))
    if not m.shared_width:
        return routed
    shared = here("moe.shared", mixture.mlp, x, **_mlp_weights(here, f"{at}.shared_experts"), **here.activation())
    return here("residual.add", add, routed, y=shared, site="moe")
