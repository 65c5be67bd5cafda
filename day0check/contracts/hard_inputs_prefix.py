"""Hard inputs of the prefix cache and of memory that changes hands."""

from __future__ import annotations

from typing import Any

import torch

from day0check.contracts.hard_inputs import Draw, Generator
from reference.prefix import HEAD, block_key
from reference.records import pack

PAGE, PAGES, BLOCKS = 4, 12, 3
Arguments = tuple[Any, dict[str, Any]]


def _held(d: Draw, tokens: torch.Tensor, salts: torch.Tensor, pages: list[int]) -> torch.Tensor:
    """Memory that knows the blocks of one sequence on `pages`, each with a snapshot."""
    key, held = 0, torch.full((PAGES, HEAD + 3 * PAGE), -1, dtype=torch.int64, device=d.device)
    for number, page in enumerate(pages):
        here = slice(number * PAGE, (number + 1) * PAGE)
        key = block_key(key, tokens[here].tolist(), salts[here].tolist())
        numbers = d.whole([number + 7, number + 6 if number else 0, (number + 1) * PAGE, number, key])
        held[page] = torch.cat((numbers, tokens[here], salts[here].flatten()))
    return held


def _sequence(d: Draw) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    tokens = d.integers(0, 250, BLOCKS * PAGE + 2)
    return tokens, d.integers(1, 1 << 40, len(tokens), 2), d.shuffled(PAGES)[:BLOCKS].tolist()


def _match(d: Draw, name: str) -> Arguments:
    tokens, salts, pages = _sequence(d)
    held = _held(d, tokens, salts, pages)
    if name == "nothing":
        held[:, 0] = -1
    elif name == "inside_a_block":
        tokens[PAGE + PAGE // 2] += 1
    elif name == "other_salt":
        salts[2 * PAGE - 1, 1] += 1
    elif name == "no_snapshot":
        held[pages[-1], 3] = -1
    elif name == "same_block_elsewhere":  # the tokens of a known block, after another beginning
        tokens[:PAGE] += 1
    return tokens, {"salts": salts, "held": held}


def _register(d: Draw, name: str) -> Arguments:
    tokens, salts, pages = _sequence(d)
    held = _held(d, tokens, salts, [])
    if name == "later_block":  # its parent is known, on another page
        held[next(p for p in range(PAGES) if p not in pages), :HEAD] = d.whole([40, 0, PAGE, 1, 12345])
    first = PAGE if name == "later_block" else 0
    absorbed = {"boundary": PAGE, "inside_a_block": 2 * PAGE - 1, "several": 3 * PAGE}.get(name, PAGE)
    return held, {
        "tokens": tokens[: 3 * PAGE],
        "salts": salts[: 3 * PAGE],
        "at": d.whole([first, first + absorbed]),
        "table": d.whole(pages),
        "entries": d.whole([41, 42, 43]),
        "parent": d.whole([40 if first else 0]),
        "snapshots": d.whole([-1, 5, -1]),
    }


def _release(d: Draw, name: str) -> Arguments:
    counts = d.integers(1, 2 if name == "alone" else 4, PAGES)
    pages = d.shuffled(PAGES)[:5]
    return counts, {"pages": pages, "held": counts[pages]}


def _store(d: Draw, name: str) -> Arguments:
    return d.float32(7, 4, 16, 16), {"value": d.float32(2, 4, 16, 16), "slots": d.shuffled(7)[:2]}


def _restore(d: Draw, name: str) -> Arguments:
    return d.float32(7, 4, 16, 16), {"slots": d.shuffled(7)[:2]}


def _tier(d: Draw, name: str) -> Arguments:
    """Pages of a pool and of the host; `bytes`: every pattern of them, those of NaN with a payload too."""
    pool, host = d.act(PAGES, PAGE, 24), d.act(PAGES + 3, PAGE, 24)
    if name == "bytes":
        pool, host = (d.integers(-(1 << 15), 1 << 15, *t.shape).to(torch.int16) for t in (pool, host))
        pool, host = (t.to(torch.int32).view(torch.float32) if d.dtype == torch.float32 else t for t in (pool, host))
        pool, host = (t if d.dtype == torch.float32 else t.view(d.dtype) for t in (pool, host))
    return pool, {"host": host.cpu(), "pages": d.shuffled(PAGES)[:5], "places": d.shuffled(PAGES + 3)[:5].cpu()}


RECORDS = {"plain": (32, 16), "index_key": (128, 0), "uneven": (200, 8)}  # codes, rest


def _record(d: Draw, name: str) -> Arguments:
    return d.rows(name, 19, 40), {}


def _codes(d: Draw, name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, rest = RECORDS[name]
    scale = (0.01 + d.uniform(9, -(-codes // 128))).to(d.device)
    return d.raw(9, codes).to(torch.float8_e4m3fn).to(d.device), scale, d.raw(9, rest).bfloat16().to(d.device)


def _quantise(d: Draw, name: str) -> Arguments:
    return d.rows(name, 19, 40), {"scale": (0.02 + 0.02 * d.uniform(1)).to(d.device)}


def _dequantise(d: Draw, name: str) -> Arguments:
    codes = d.raw(9, 40, scale=30.0).to(torch.float8_e4m3fn).to(d.device)
    return codes, {"scale": (0.02 + 0.02 * d.uniform(1)).to(d.device)}


def _copy(d: Draw, name: str) -> Arguments:
    pool, places = _tier(d, name)[0], d.shuffled(PAGES)
    return pool, {"pages": places[:5], "into": places[5:10]}


def _rewrite(d: Draw, name: str) -> Arguments:
    pool, others = _tier(d, name)[0], _tier(d, name)[0]
    return pool, {"value": others[:5].clone(), "pages": d.shuffled(PAGES)[:5]}


def _pack(d: Draw, name: str) -> Arguments:
    codes, scale, rest = _codes(d, name)
    return codes, {"scale": scale, "rest": rest}


def _unpack(d: Draw, name: str) -> Arguments:
    codes, scale, rest = _codes(d, name)
    return pack(codes, scale=scale, rest=rest), {"width": codes.shape[1]}


def _stage(d: Draw, name: str) -> Arguments:
    """A step of three requests; `padding`: with two rows that belong to none and hold what an earlier step left."""
    counts = (4, 1, 2)
    real = sum(counts)
    rows = real + 2 if name == "padding" else real
    owner = torch.tensor([b for b, count in enumerate(counts) for _ in range(count)] + [-1] * (rows - real))
    arrays = {
        "positions": d.integers(0, 900, rows).cpu(),
        "owner": owner,
        "offsets": torch.tensor([0, 4, 5, 7]),
        "table": d.integers(-1, PAGES, 3, 15).cpu(),
        "lengths": d.integers(1, 900, 3).cpu(),
        "load_slots": d.integers(-1, 3, 3).cpu(),
        "store_slots": torch.tensor([2, 0, 1]),
    }
    return d.integers(0, 320, rows).cpu(), arrays | {"on": torch.empty(0, dtype=torch.int64, device=d.device)}


GENERATORS: dict[str, Generator] = {
    "batch.stage": _stage,
    "prefix.match": _match,
    "prefix.register": _register,
    "prefix.store": _store,
    "prefix.restore": _restore,
    "pool.release": _release,
    "kv.offload": _tier,
    "kv.reload": _tier,
    "kv.copy": _copy,
    "kv.rewrite": _rewrite,
    "kv.record": _record,
    "index.record": _record,
    "kv.quantise": _quantise,
    "kv.dequantise": _dequantise,
    "kv.pack": _pack,
    "kv.unpack": _unpack,
}
