"""The sublayer of grouped-query attention: keys and values of few heads in the paged pool, queries of many."""

from __future__ import annotations

import torch
from torch import Tensor

from day0check.accelerated.layers import Step
from day0check.accelerated.prefix_chunks import attend
from day0check.accelerated.weights import Gqa
from day0check.probe.recorder import Here


def gqa(step: Step, at: Here, layer: int, x: Tensor, p: Gqa) -> Tensor:
    """Attention of `x` [rows, D] on all keys of a request; a page holds [key | value] of each key head, [Hk, 2d]."""
    config, g, batch = step.config, step.config.gqa, step.batch
    q, k, v = (at("gqa.project", x, site=site, weight=getattr(p, site)).unflatten(-1, (-1, g.dim)) for site in "qkv")
    q = at("norm.rms", q, site="query", weight=p.query_norm, eps=config.eps)
    k = at("norm.rms", k, site="key", weight=p.key_norm, eps=config.eps)
    q, k = (step.rotated(at, part, site, config.rope.layout) for part, site in ((q, "query"), (k, "key")))
    pool, slots = step.caches.kv[layer], step.page_slots()
    at("kv.write", pool, value=torch.cat((k, v), -1).flatten(1), slots=slots)

    def split(rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows.unflatten(-1, (-1, 2 * g.dim)).split(g.dim, -1)

    if step.reads_pages("gqa.attention"):
        given = {"pool": pool, "table": batch.table, "value_width": g.dim}
    elif step.prefix is not None:
        y = attend(step, at, layer, q, split, scale=g.scale)
        return step.reduced(at, at("gqa.output", y.flatten(1), weight=p.output), "attention")
    else:
        where = {"table": batch.table, "owner": batch.every, "indices": batch.history}
        rows = at("kv.gather", pool, row_map=batch.requests, **where)
        given = dict(zip(("keys", "values"), split(rows), strict=True))
    y = at("gqa.attention", q, **given, owner=batch.owner, visible=batch.visible, scale=g.scale)
    return step.reduced(at, at("gqa.output", y.flatten(1), weight=p.output), "attention")
