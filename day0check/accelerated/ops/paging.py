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
    pool.flatten(0, 1)[slots[real]] = value[real].to(pool.dtype)
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
        rows = pool.flatten(0, 1)[flat]
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
