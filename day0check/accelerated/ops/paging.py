"""Paged pools and state slots: slot = table[request, position // page] * page + position % page.

A pool is a tensor, or memory whose layout somebody else owns: then its rows go through that layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from day0check.probe.registry import OwnedPool


def slots(table: Tensor, *, owner: Tensor, positions: Tensor, page: int) -> Tensor:
    """Flat slot of each row; -1 for a padding row. `table` [batch, pages], `owner` and `positions` [rows], int64."""
    real = owner >= 0
    block = torch.where(real, positions, 0).div(page, rounding_mode="floor")
    found = table[owner.clamp(min=0), block] * page + positions % page
    return torch.where(real, found, -1)


def write(pool: Tensor | OwnedPool, *, value: Tensor, slots: Tensor) -> None:
    """Writes `value` [rows, width] into `pool` [pages, page, width] at flat `slots` [rows]; -1 writes nothing."""
    real = slots >= 0
    if isinstance(pool, OwnedPool):
        return pool.write(value[real], slots[real])
    at = slots[real]
    pool[at.div(pool.shape[1], rounding_mode="floor"), at % pool.shape[1]] = value[real].to(pool.dtype)
    return None


def gather(pool: Tensor | OwnedPool, *, table: Tensor, owner: Tensor, indices: Tensor) -> Tensor:
    """Rows at logical positions `indices` [rows, k] of each row's request: [rows, k, width]; -1 gives zeros."""
    page = pool.page if isinstance(pool, OwnedPool) else pool.shape[1]
    wanted = indices.to(torch.int64)
    absent = (wanted < 0) | (owner < 0).unsqueeze(1)
    wanted = wanted.masked_fill(absent, 0)
    pages = table[owner.clamp(min=0).unsqueeze(1), wanted.div(page, rounding_mode="floor")]
    flat = (pages * page + wanted % page).masked_fill(absent, 0)
    if isinstance(pool, OwnedPool):
        rows = pool.read(flat.flatten()).unflatten(0, flat.shape)
    else:
        rows = pool[flat.div(page, rounding_mode="floor"), flat % page]
    return rows.masked_fill(absent.unsqueeze(-1), 0)


def state_load(pool: Tensor | OwnedPool, *, slots: Tensor) -> Tensor:
    """The state in each of `slots` [batch] of `pool` [slots, ...]; slot -1 is a fresh state of zeros."""
    at = slots.clamp(min=0)
    states = pool.read(at) if isinstance(pool, OwnedPool) else pool[at]
    return states.masked_fill((slots < 0).view(-1, *[1] * (states.dim() - 1)), 0)


def state_store(pool: Tensor | OwnedPool, *, value: Tensor, slots: Tensor) -> None:
    """Writes `value` [batch, ...] into `slots` [batch] of `pool`; -1 writes nothing."""
    real = slots >= 0
    if isinstance(pool, OwnedPool):
        return pool.write(value[real], slots[real])
    pool[slots[real]] = value[real].to(pool.dtype)
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
