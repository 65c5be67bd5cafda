"""Paged pools and state slots: slot = table[request, position // page] * page + position % page.

A pool is a tensor, or memory whose layout somebody else owns: then its rows go through that layout.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from day0check.probe.registry import OwnedPool


def slots(table: Tensor, *, owner: Tensor, positions: Tensor, page: int) -> Tensor:
    """Flat slot of each row; -1 for a padding row. `table` [batch, pages], `owner` and `positions` [rows], int64."""
    real = owner >= 0
    block, rest = _page_and_place(torch.where(real, positions, 0), page)
    found = table[owner.clamp(min=0), block] * page + rest
    return torch.where(real, found, -1)


def _page_and_place(positions: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """`positions` divided by `page`, rounded down, and what is left; quicker where `page` is a power of two."""
    if page & (page - 1) == 0:
        return positions >> (page.bit_length() - 1), positions & (page - 1)
    return positions.div(page, rounding_mode="floor"), positions % page


def write(pool: Tensor | OwnedPool, *, value: Tensor, slots: Tensor) -> None:
    """Writes `value` [rows, width] into `pool` [pages, page, width] at flat `slots` [rows]; -1 writes nothing."""
    value, at = _real(value, slots)
    if isinstance(pool, OwnedPool):
        return pool.write(value, at)
    if at.device.type == "cpu" and at.numel() == 1:
        number, place = divmod(int(at), pool.shape[1])
        pool[number, place].copy_(value[0])
    else:
        pool[_page_and_place(at, pool.shape[1])] = value.to(pool.dtype)
    return None


def _real(value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of `value` that go somewhere, and where. A CPU sees at once whether all of them do."""
    if slots.device.type == "cpu" and slots.numel() and int(slots.min()) >= 0:
        return value, slots
    real = slots >= 0
    return value[real], slots[real]


def gather(pool: Tensor | OwnedPool, *, table: Tensor, owner: Tensor, indices: Tensor) -> Tensor:
    """Rows at logical positions `indices` [rows, k] of each row's request: [rows, k, width]; -1 gives zeros.

    A CPU sees when a request's whole history is wanted, and then copies page by page.
    """
    if isinstance(pool, OwnedPool):
        flat, absent = _located(table, owner, indices, pool.page)
        return pool.read(flat.flatten()).unflatten(0, flat.shape).masked_fill(absent.unsqueeze(-1), 0)
    page = pool.shape[1]
    if pool.device.type != "cpu":
        flat, absent = _located(table, owner, indices, page)
        return pool[_page_and_place(flat, page)].masked_fill_(absent.unsqueeze(-1), 0)
    lengths = _history_lengths(owner, indices, page)
    if lengths is not None and table.shape == (len(lengths), indices.shape[1] // page) and int(table.min()) >= 0:
        rows = pool.index_select(0, table.flatten()).view(*indices.shape, pool.shape[2])
        for number, length in enumerate(lengths):
            rows[number, length:] = 0  # of the last page, which others may have used before
        return rows
    flat, absent = _located(table, owner, indices, page)
    if pool.stride(0) == page * pool.stride(1) and flat.numel() and int(flat.min()) >= 0:
        rows = pool.flatten(0, 1).index_select(0, flat.flatten()).unflatten(0, flat.shape)
    else:
        rows = pool[_page_and_place(flat, page)]
    return rows.masked_fill_(absent.unsqueeze(-1), 0) if bool(absent.any()) else rows


def gather_chunk(
    pool: Tensor | OwnedPool, *, table: Tensor, owner: Tensor, indices: Tensor, out: Tensor | None = None
) -> Tensor:
    """`gather` of a chunk of each request's prefix, written into `out` [rows, k, width]: the result is `out`."""
    if out is None or isinstance(pool, OwnedPool):
        rows = gather(pool, table=table, owner=owner, indices=indices)
        return rows if out is None else out.copy_(rows)
    flat, absent = _located(table, owner, indices, pool.shape[1])
    if pool.stride(0) == pool.shape[1] * pool.stride(1):
        torch.index_select(pool.flatten(0, 1), 0, flat.flatten(), out=out.view(-1, out.shape[2]))
    else:
        out.copy_(pool[flat.div(pool.shape[1], rounding_mode="floor"), flat % pool.shape[1]])
    return out.masked_fill_(absent.unsqueeze(-1), 0)


def _located(table: Tensor, owner: Tensor, indices: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """The flat slot int64 of each of `indices` [rows, k], 0 where there is none, and where that is."""
    absent = (indices < 0) | (owner < 0).unsqueeze(1)
    wanted = indices.masked_fill(absent, 0)
    block, rest = (part.to(torch.int64) for part in _page_and_place(wanted, page))
    if table.shape[0] == 1:  # of one request: a row of the table for all
        pages = table[0].index_select(0, block.flatten()).view(block.shape)
    else:
        pages = table[owner.clamp(min=0).unsqueeze(1), block]
    return pages.mul_(page).add_(rest).masked_fill_(absent, 0), absent


_seen_history: tuple[weakref.ref[Tensor], int, int, tuple[int, ...] | None] | None = None  # of the latest indices


def _history_lengths(owner: Tensor, indices: Tensor, page: int) -> tuple[int, ...] | None:
    """How many positions each request has, where `indices` [batch, n] are all of them in order, padded to whole pages
    with -1, and `owner` counts the requests; None where they are anything else. Every layer of a step asks with the
    same tensor: the answer is kept until another comes or its values change."""
    global _seen_history
    batch, n = indices.shape
    if n % page or not n or owner.shape[0] != batch or owner.tolist() != list(range(batch)):
        return None
    seen = _seen_history
    if seen is not None and seen[0]() is indices and seen[1] == indices._version and seen[2] == page:
        return seen[3]
    lengths = (indices >= 0).sum(1)
    places = torch.arange(n, device=indices.device)
    whole = bool((torch.where(places < lengths.unsqueeze(1), places, -1) == indices).all())
    found = tuple(lengths.tolist()) if whole else None
    _seen_history = (weakref.ref(indices), indices._version, page, found)
    return found


def state_load(pool: Tensor | OwnedPool, *, slots: Tensor) -> Tensor:
    """The state in each of `slots` [batch] of `pool` [slots, ...]; slot -1 is a fresh state of zeros."""
    if not isinstance(pool, OwnedPool) and slots.device.type == "cpu" and slots.numel() and int(slots.min()) >= 0:
        return pool.index_select(0, slots)
    at = slots.clamp(min=0)
    states = pool.read(at) if isinstance(pool, OwnedPool) else pool[at]
    return states.masked_fill((slots < 0).view(-1, *[1] * (states.dim() - 1)), 0)


def state_store(pool: Tensor | OwnedPool, *, value: Tensor, slots: Tensor) -> None:
    """Writes `value` [batch, ...] into `slots` [batch] of `pool`; -1 writes nothing."""
    value, at = _real(value, slots)
    if isinstance(pool, OwnedPool):
        return pool.write(value, at)
    pool[at] = value.to(pool.dtype)
    return None


def offload(pool: Tensor | OwnedPool, *, host: Tensor, pages: Tensor, places: Tensor) -> None:
    """Copies `pages` [n] of `pool` (or rows of a state pool) to `places` [n] of host memory, byte for byte."""
    taken = pool.read(_rows_of(pool, pages)) if isinstance(pool, OwnedPool) else pool[pages]
    host[places] = taken.reshape(-1, *host.shape[1:]).to(host.device)


def reload(pool: Tensor | OwnedPool, *, host: Tensor, pages: Tensor, places: Tensor) -> None:
    """Copies `places` [n] of host memory back into `pages` [n] of `pool`, byte for byte."""
    taken = _staged(host, places) if pool.device.type == "cuda" else host[places]
    if isinstance(pool, OwnedPool):
        return pool.write(taken.to(pool.device).reshape(-1, *pool.row), _rows_of(pool, pages))
    pool[pages] = taken.to(pool.device, non_blocking=True)
    return None


def copy(pool: Tensor | OwnedPool, *, pages: Tensor, into: Tensor) -> None:
    """Copies `pages` [n] of `pool` to the pages `into` [n] of the same pool, byte for byte."""
    if isinstance(pool, OwnedPool):
        return pool.write(pool.read(_rows_of(pool, pages)), _rows_of(pool, into))
    pool[into] = pool[pages]
    return None


def rewrite(pool: Tensor | OwnedPool, *, value: Tensor, pages: Tensor) -> None:
    """Writes `value` [n, ...] over the whole `pages` [n] of `pool`, which keep their content in another scale."""
    if isinstance(pool, OwnedPool):
        return pool.write(value.reshape(-1, *pool.row), _rows_of(pool, pages))
    pool[pages] = value.to(pool.dtype)
    return None


def _staged(host: Tensor, places: Tensor) -> Tensor:
    """Rows of host memory side by side where a copy to the device need not be waited for."""
    staged = torch.empty(len(places), *host.shape[1:], dtype=host.dtype, pin_memory=True)
    return torch.index_select(host, 0, places, out=staged)


def _rows_of(pool: OwnedPool, pages: Tensor) -> Tensor:
    """Every slot of `pages`, page by page."""
    return (pages.unsqueeze(1) * pool.page + torch.arange(pool.page, device=pages.device)).flatten()


def kept(x: Tensor) -> Tensor:
    """A copy of `x` [rows, ...] that stays as it is when the memory of `x` is used again."""
    return torch.empty_like(x).copy_(x)
