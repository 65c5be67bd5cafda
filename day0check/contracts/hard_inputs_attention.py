"""Hard inputs of MLA, sparse attention, caches and Kimi delta attention."""

from __future__ import annotations

from typing import Any

import torch

from day0check.contracts.hard_inputs import Draw, Generator

ROWS, PAGE = 37, 16
HEADS, LATENT, ROPE = 4, 32, 16
Arguments = tuple[Any, dict[str, Any]]


def _absorb(d: Draw, name: str) -> Arguments:
    return d.rows(name, ROWS, HEADS, 16), {"weight": d.act(HEADS, 16, LATENT, scale=0.25)}


def _value(d: Draw, name: str) -> Arguments:
    return d.rows(name, ROWS, HEADS, LATENT), {"weight": d.act(HEADS, LATENT, 16, scale=0.18)}


def batches(d: Draw, name: str, keys: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """(requests, owner [rows], visible [rows]) by the name of the input."""
    rows = torch.arange(ROWS, device=d.device)
    if name == "ragged":
        owner = (rows > 0).long() + (rows > 20).long()
        return 3, owner, 1 + d.integers(0, keys, ROWS)
    if name == "page_edge":
        edges = d.whole([PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, keys - 1, keys])
        return 1, torch.zeros_like(rows), edges[rows % len(edges)]
    visible = keys - ROWS + 1 + rows
    if name == "one_key":
        visible = torch.ones_like(rows)
    elif name == "no_key":
        visible = torch.where(rows % 3 == 0, torch.zeros_like(rows), visible)
    return 1, torch.zeros_like(rows), visible


def _attention(d: Draw, name: str) -> Arguments:
    keys = 4 * PAGE + 1
    requests, owner, visible = batches(d, name, keys)
    latent = d.act(requests, keys, 1, LATENT + ROPE)
    scale = (12.0 if name == "sharp" else 1.0) * (16 + ROPE) ** -0.5
    return d.act(ROWS, HEADS, LATENT + ROPE), {
        "keys": latent,
        "values": latent[..., :LATENT].contiguous(),
        "owner": owner,
        "visible": visible,
        "scale": scale,
    }


def _partial(d: Draw, name: str) -> Arguments:
    q, kwargs = _attention(d, name)
    if name == "grouped":  # two query heads to a key, as where keys are not latent
        keys = d.act(*kwargs["keys"].shape[:2], HEADS // 2, LATENT + ROPE)
        kwargs |= {"keys": keys, "values": d.act(*keys.shape[:3], LATENT)}
    return q, kwargs


def _merge(d: Draw, name: str) -> Arguments:
    parts, lse = d.raw(ROWS, 3, HEADS, 16), d.raw(ROWS, 3, HEADS, scale=3.0)
    if name == "empty_part":
        lse[::2, 1] = -torch.inf
        parts[::2, 1] = 1e4  # ignored: its weight is zero
    elif name == "all_empty":
        lse[3] = -torch.inf
    return d.to(parts), {"lse": lse.to(d.device)}


def _gated_output(d: Draw, name: str) -> Arguments:
    x, gate = d.rows(name, ROWS, 64), d.raw(ROWS, 64)
    if name == "closed_gate":
        gate[::4] = -30.0
    return x, {"gate": d.to(gate), "weight": d.weight(64, 64)}


# --------------------------------------------------------------------------------------------------- sparse attention


def _index_weights(d: Draw, name: str) -> Arguments:
    return d.rows(name, ROWS, 64), {"weight": d.weight(16, 64)}


def _index_key(d: Draw, name: str) -> Arguments:
    return d.rows(name, ROWS, 64), {
        "weight": d.weight(32, 64),
        "norm_weight": d.norm_weight(32),
        "norm_bias": d.act(32, scale=0.1),
        "eps": 1e-6,
    }


def _pool_key(d: Draw, name: str) -> Arguments:
    """`nothing_before`: pools that overlap, the first of which has nothing to overlap."""
    if name == "plain":
        return d.act(9, 4, 32), {"gates": d.act(9, 4, 32), "ape": d.act(4, 32)}
    keys, gates = d.act(9, 8, 32), d.act(9, 8, 32)
    keys[0, :4], gates[0, :4] = 0, -torch.inf
    return keys, {"gates": gates, "ape": d.act(8, 32)}


def _score(d: Draw, name: str) -> Arguments:
    keys = 4 * PAGE + 1
    requests, owner, _ = batches(d, name, keys)
    q, k, weights = d.raw(ROWS, 16, 32), d.raw(requests, keys, 32), d.raw(ROWS, 16, scale=0.25)
    if name == "all_negative":
        q, k = q.abs(), -k.abs()
    elif name == "negative_weights":
        weights = -weights.abs()
    return d.to(q), {"weights": weights.to(d.device), "keys": d.to(k), "owner": owner, "scale": 32**-0.5}


def _select(d: Draw, name: str) -> Arguments:
    keys, k = 4 * PAGE + 1, 16
    scores = d.raw(ROWS, keys)
    visible = keys - ROWS + 1 + torch.arange(ROWS)
    if name == "ties":
        scores = torch.round(scores * 2) / 2
    elif name == "plateau_of_zeros":
        scores = torch.where(scores > 1.2, scores, torch.zeros_like(scores))
    elif name == "clustered":
        scores = 1 + scores * 2.0**-20
    elif name == "fewer_than_k":
        visible = 1 + torch.arange(ROWS) % (k - 1)
    elif name == "no_key":
        visible = torch.where(torch.arange(ROWS) % 3 == 0, torch.zeros_like(visible), visible)
    elif name in ("exactly_k", "one_over_k"):
        visible = torch.full((ROWS,), k if name == "exactly_k" else k + 1)
    return scores.to(d.device), {"k": k, "visible": visible.to(d.device), "threshold": None}


def _sparse_attention(d: Draw, name: str) -> Arguments:
    k = 16
    valid = d.uniform(ROWS, k) < 0.9
    if name == "one_key":
        valid = torch.nn.functional.one_hot(torch.arange(ROWS) % k, k).bool()
    elif name == "no_key":
        valid[::3] = False
    elif name == "leading_invalid":
        valid[:, :5] = False
    return d.rows(name, ROWS, HEADS, LATENT + ROPE), {
        "keys": d.act(ROWS, k, LATENT + ROPE),
        "valid": valid.to(d.device),
        "value_width": LATENT,
        "scale": (12.0 if name == "sharp" else 1.0) * (16 + ROPE) ** -0.5,
    }


# ------------------------------------------------------------------------------------------------------------- caches


def _table(d: Draw, requests: int, pages: int) -> torch.Tensor:
    """Pages of each request, shuffled over the whole pool."""
    return d.shuffled(requests * pages).reshape(requests, pages)


def _positions(d: Draw, name: str, pages: int) -> torch.Tensor:
    if name == "page_edge":
        edges = d.whole([0, PAGE - 1, PAGE, 2 * PAGE - 1, 2 * PAGE])
        return edges[torch.arange(ROWS, device=d.device) % len(edges)]
    if name == "last_page":
        return (pages - 1) * PAGE + torch.arange(ROWS, device=d.device) % PAGE
    return torch.arange(ROWS, device=d.device)


def _slots(d: Draw, name: str) -> Arguments:
    owner = torch.arange(ROWS, device=d.device) % 3
    if name == "padding_row":
        owner[-4:] = -1
    return _table(d, 3, 4), {"owner": owner, "positions": _positions(d, name, 4), "page": PAGE}


def _write(d: Draw, name: str) -> Arguments:
    pages = 6
    if name == "page_edge":
        slots = d.whole([0, PAGE - 1, PAGE, 2 * PAGE - 1, 2 * PAGE, 3 * PAGE - 1])
    elif name == "last_page":
        slots = (pages - 1) * PAGE + torch.arange(PAGE, device=d.device)
    else:
        slots = d.shuffled(pages * PAGE)[:ROWS]
    if name == "padding_slot":
        slots[::5] = -1
    return d.act(pages, PAGE, 24), {"value": d.act(len(slots), 24), "slots": slots}


def _gather(d: Draw, name: str) -> Arguments:
    requests, pages, k = 3, 4, 8
    table = _table(d, requests, pages)
    if name == "plain":
        table = torch.arange(requests * pages, device=d.device).reshape(requests, pages)
    indices = d.integers(-1, pages * PAGE, ROWS, k)
    if name in ("page_edge", "last_page"):
        indices = _positions(d, name, pages)[:, None].expand(-1, k).contiguous()
    elif name == "all_minus_one":
        indices = torch.full_like(indices, -1)
    pool = d.act(requests * pages, PAGE, 24)
    owner = torch.arange(ROWS, device=d.device) % requests
    return pool, {"table": table, "owner": owner, "indices": indices.to(torch.int32)}


def _gather_chunk(d: Draw, name: str) -> Arguments:
    """A gather into a workspace that still holds what an earlier chunk left there."""
    pool, kwargs = _gather(d, name)
    left = d.act(*kwargs["indices"].shape, pool.shape[2], scale=8.0)
    return pool, kwargs | {"out": left}


def _state_load(d: Draw, name: str) -> Arguments:
    slots = d.shuffled(7)[:4]
    if name == "fresh":
        slots[1::2] = -1
    return d.float32(7, HEADS, 16, 16), {"slots": slots}


def _state_store(d: Draw, name: str) -> Arguments:
    return d.float32(7, HEADS, 16, 16), {"value": d.float32(4, HEADS, 16, 16), "slots": d.shuffled(7)[:4]}


# ------------------------------------------------------------------------------------------------ Kimi delta attention


def _offsets(d: Draw, name: str) -> torch.Tensor:
    lengths = {
        "shorter_than_state": [1, 2, 1, 3],
        "ragged": [1, 40, 5, 17],
        "chunk_edge": [63, 64, 65],
        "fresh_state": [20, 17],
    }.get(name, [70])
    return d.whole([0, *torch.tensor(lengths).cumsum(0).tolist()])


def _conv(d: Draw, name: str) -> Arguments:
    offsets = _offsets(d, name)
    state = d.act(len(offsets) - 1, 3, 48)
    if name == "fresh_state":
        state = torch.zeros_like(state)
    return d.act(int(offsets[-1]), 48), {"weight": d.float32(48, 4, scale=0.5), "state": state, "offsets": offsets}


def _gates(d: Draw, name: str) -> Arguments:
    scale = {"saturated": 40.0, "strong_decay": 2.0}.get(name, 1.0)
    f, b = d.raw(ROWS, HEADS, 16, scale=scale), d.raw(ROWS, HEADS, scale=scale)
    if name == "strong_decay":
        f = f + 12
    return d.to(f), {
        "b": d.to(b),
        "a_log": d.float32(HEADS, scale=0.5),
        "dt_bias": d.float32(HEADS, 16, scale=0.5),
        "lower_bound": -5.0,
    }


def _delta_rule(d: Draw, name: str) -> Arguments:
    offsets = _offsets(d, name)
    rows, requests, width = int(offsets[-1]), len(offsets) - 1, 16
    g = -5 * torch.sigmoid(d.raw(rows, HEADS, width, scale=2.0) - 1)
    beta = torch.sigmoid(d.raw(rows, HEADS))
    if name == "strong_decay":
        g = torch.full_like(g, -5.0) + d.uniform(rows, HEADS, width) * 0.05
    elif name == "beta_extremes":
        beta = torch.round(beta)
    elif name == "long_state":
        g = g * 1e-3
    return d.act(rows, HEADS, width), {
        "k": d.act(rows, HEADS, width),
        "v": d.act(rows, HEADS, width),
        "g": g.to(d.device),
        "beta": beta.to(d.device),
        "state": d.float32(requests, HEADS, width, width, scale=8.0 if name == "long_state" else 0.5),
        "offsets": offsets,
        "chunk": None if name in ("ragged", "long_state") else 64,
    }


def _kda_output(d: Draw, name: str) -> Arguments:
    gate = d.raw(ROWS, 64)
    if name == "closed_gate":
        gate[::4] = -30.0
    return d.rows(name, ROWS, HEADS, 16), {
        "gate": d.to(gate),
        "norm_weight": d.norm_weight(16, torch.float32),
        "weight": d.weight(64, 64),
        "eps": 1e-5,
    }


GENERATORS: dict[str, Generator] = {
    "mla.absorb": _absorb,
    "mla.value": _value,
    "mla.attention": _attention,
    "mla.partial": _partial,
    "mla.merge": _merge,
    "mla.output": _gated_output,
    "dsa.index_weights": _index_weights,
    "dsa.index_key": _index_key,
    "dsa.pool_key": _pool_key,
    "dsa.score": _score,
    "dsa.select": _select,
    "dsa.attention": _sparse_attention,
    "kv.slots": _slots,
    **dict.fromkeys(("kv.write", "index.write"), _write),
    **dict.fromkeys(("kv.gather", "index.gather"), _gather),
    "prefix.gather": _gather_chunk,
    "state.load": _state_load,
    "state.store": _state_store,
    "kda.conv": _conv,
    "kda.gates": _gates,
    "kda.attention": _delta_rule,
    "kda.output": _kda_output,
}
