"""The lightning index of a sparse attention layer: its keys, one a token or one a pool of tokens, and what it picks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from day0check.accelerated import records
from day0check.accelerated.batch import Batch
from day0check.accelerated.weights import Index
from day0check.probe.recorder import Here
from day0check.probe.rows import RowMap

if TYPE_CHECKING:
    from day0check.accelerated.layers import Step

SCORE_BYTES = 256 << 20  # of the scores of one layer that exist at once; a single row may need more
CAUSAL_ROWS = 256  # of one request that are scored at a time, against no key behind the last of them


def pick(step: Step, at: Here, layer: int, x: Tensor, latent_query: Tensor, p: Index) -> Tensor:
    """Writes the step's index keys, scores every key of each row's request and picks the best visible ones.

    `x` [rows, D], `latent_query` [rows, q_lora]. Positions int32 [rows, k] of the picked tokens, -1 for none.
    """
    i, batch, pooled = step.config.index, step.batch, step.config.index.pool > 1
    q = at("dsa.index_query", latent_query, weight=p.query).view(x.shape[0], i.heads, i.dim)
    q = torch.cat((step.rotated(at, q[..., : i.rope], "index_query", i.rope_layout), q[..., i.rope :]), -1)
    weights = at("dsa.index_weights", x, weight=p.weights)
    key = at("dsa.index_key", x, weight=p.key, norm_weight=p.norm_weight, norm_bias=p.norm_bias, eps=i.key_norm_eps)
    key = key.view(x.shape[0], i.lanes, i.dim)
    turned = step.rotated(at, key[..., : i.rope], "index_key", i.rope_layout)
    key = torch.cat((turned, key[..., i.rope :]), -1).flatten(1)
    if pooled:
        _write_pools(step, at, layer, x, key, p)
        history, visible = step.pool_plan().history, step.pool_plan().visible
    else:
        _write(step, at, layer, key, slots=step.page_slots())
        history, visible = batch.history, batch.visible
    keys = at(
        "index.gather",
        step.caches.index[layer],
        row_map=batch.requests,
        table=batch.table,
        owner=batch.every,
        indices=history,
    )
    keys = records.unpacked(at, keys, site="index", codes=i.dim, row_map=batch.requests)
    picked = _choose(step, at, q, weights, keys, visible)
    if not pooled:
        return picked
    return at("dsa.expand", picked, visible=batch.visible, pool=i.pool, tail=i.pool_tail)


def _choose(step: Step, at: Here, q: Tensor, weights: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """Positions int32 [rows, k] of the best of the first `visible` [rows] of `keys` [batch, n, dI], -1 for none.

    Scores [rows, n] are made and read for a tile of rows at a time.
    """
    i, batch = step.config.index, step.batch
    threshold = i.threshold if i.select == "threshold" else None
    tiles, picked = _tiles(batch, i.pool, keys.shape[1]), []
    for some, seen_keys in tiles:
        tiled = {"row_map": batch.rows.take(range(some.start, some.stop))} if len(tiles) > 1 and step.watched() else {}
        own = {"weights": weights[some], "keys": keys[:, :seen_keys], "owner": batch.owner[some]}
        scores = at("dsa.score", q[some], **tiled, **own, scale=i.dim**-0.5)
        seen = visible[some]
        picked.append(at("dsa.select", scores, **tiled, k=i.topk // i.pool, visible=seen, threshold=threshold))
    return picked[0] if len(picked) == 1 else torch.cat(picked)


def _tiles(batch: Batch, pool: int, keys: int) -> list[tuple[slice, int]]:
    """Which rows are scored at a time, and how many keys from the first on the last of them sees.

    Rows that decode, or belong to several requests, are as many at a time as `SCORE_BYTES` has room for, and may see
    all `keys`. A prompt that comes alone sees half of its keys on average: those behind a tile are left out.
    """
    rows = batch.ids.shape[0]
    size = max(1, SCORE_BYTES // (4 * max(1, keys)))
    alone = batch.phase == "prefill" and len(batch.parts) == 1 and rows == len(batch.parts[0].tokens)
    if not alone or rows <= CAUSAL_ROWS:
        return [(slice(start, min(start + size, rows)), keys) for start in range(0, rows, size)]
    size, first = min(size, CAUSAL_ROWS), batch.parts[0].start
    slices = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
    return [(some, min(keys, max(1, (first + some.stop) // pool))) for some in slices]


def _write_pools(step: Step, at: Here, layer: int, x: Tensor, key: Tensor, p: Index) -> None:
    """Writes a key for every pool that is whole now, and keeps `key` [rows, lanes * dI] and its gates of what later
    pools need."""
    plan, batch, states = step.pool_plan(), step.batch, step.caches.pool[layer]
    gate = at("dsa.pool_gate", x, weight=p.pool_gate)
    waited = at("state.load", states, site="pool", row_map=batch.requests, slots=batch.load_slots)
    keys, gates = (torch.cat((waited[:, n].flatten(0, 1), new)) for n, new in enumerate((key, gate)))
    waiting = torch.stack((keys[plan.waiting], gates[plan.waiting]), 1)  # -1 takes any row
    waiting = waiting.masked_fill((plan.waiting < 0)[:, None, :, None], 0)
    at("state.store", states, site="pool", row_map=batch.requests, value=waiting, slots=batch.store_slots)
    if not len(plan.closed):
        return
    rows, overlap = plan.closed, step.config.index.overlap
    of_pools = {"gates": _members(gates, plan.members, float("-inf"), overlap)}
    pooled = at("dsa.pool_key", _members(keys, plan.members, 0.0, overlap), row_map=rows, ape=p.pool_place, **of_pools)
    _write(step, at, layer, pooled, slots=step.pool_slots(), row_map=rows)


def _write(step: Step, at: Here, layer: int, keys: Tensor, *, slots: Tensor, row_map: RowMap | None = None) -> None:
    """Writes index keys [n, dI] in the form that the cache keeps."""
    pool = step.caches.index[layer]
    if pool.dtype == torch.uint8:
        keys = records.packed(at, keys, site="index", codes=keys.shape[1], row_map=row_map)
    at("index.write", pool, row_map=row_map, value=keys, slots=slots)


def _members(rows: Tensor, members: Tensor, absent: float, overlap: bool) -> Tensor:
    """The tokens of each pool, [closed, P, dI]; where pools overlap [closed, 2P, dI], the tokens of the pool before by
    their first lane, and `absent` values where there is none."""
    found = rows[members]
    if not overlap:
        return found
    found = found.masked_fill((members < 0).unsqueeze(-1), absent)
    before, own = found.chunk(2, 1)
    return torch.cat((before.chunk(2, -1)[0], own.chunk(2, -1)[1]), 1)
