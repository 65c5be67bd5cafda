"""Paged caches and state slots. A pool is [pages, page, width] with slot = table[owner, position // page] * page +
position % page; a state pool is [slots, ...].

Functions that write return nothing. Beside each stands the function that reads back: it takes the same arguments after
the write and returns (found, expected), equal bytes when the write was right. Rows that are not written are in neither.
"""

from __future__ import annotations

import torch
from torch import Tensor


def slots(table: Tensor, *, owner: Tensor, positions: Tensor, page: int) -> Tensor:
    """Flat slot of each row's position: table int64 [batch, pages], owner and positions int64 [rows] -> int64 [rows].

    -1 for a padding row (owner -1), for a negative position, and where the table has no page (-1 or past its end).
    """
    return _slots(table, owner, positions[:, None], page)[:, 0]


def _slots(table: Tensor, owner: Tensor, positions: Tensor, page: int) -> Tensor:
    positions = positions.long()
    number = positions // page
    inside = (owner[:, None] >= 0) & (positions >= 0) & (number < table.shape[1])
    if table.shape[1] == 0:
        return torch.full_like(positions, -1)
    physical = table[owner.clamp(min=0)[:, None], number.clamp(0, table.shape[1] - 1)].long()
    return torch.where(inside & (physical >= 0), physical * page + positions % page, -1)


def write(pool: Tensor, *, value: Tensor, slots: Tensor) -> None:
    """Writes value [rows, width] into flat slots int64 [rows] of pool [pages, page, width]; slot -1 writes nothing."""
    rows, at = _written_rows(slots)
    _bytes(pool)[at // pool.shape[1], at % pool.shape[1]] = _bytes(value[rows].to(pool.dtype))


def written(pool: Tensor, *, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(what is now in the pool at the slots, what must be there) after `write` with the same arguments, by row."""
    rows, at = _written_rows(slots)
    return _bytes(pool)[at // pool.shape[1], at % pool.shape[1]].view(pool.dtype), value[rows].to(pool.dtype)


def gather(pool: Tensor, *, table: Tensor, owner: Tensor, indices: Tensor) -> Tensor:
    """Rows at logical positions `indices` of each row's request; index -1 (and what has no page) gives zeros.

    pool [pages, page, width], table int64 [batch, pages], owner int64 [rows], indices int32 [rows, k]
    -> [rows, k, width] in the pool's dtype.
    """
    at = _slots(table, owner, indices, pool.shape[1])
    kept = at.clamp(min=0)
    y = _bytes(pool)[kept // pool.shape[1], kept % pool.shape[1]]
    return y.masked_fill(at[..., None] < 0, 0).view(pool.dtype)


def gather_chunk(pool: Tensor, *, table: Tensor, owner: Tensor, indices: Tensor, out: Tensor | None = None) -> Tensor:
    """`gather` of a chunk of each request's prefix, as the rows must lie in the workspace `out` afterwards."""
    return gather(pool, table=table, owner=owner, indices=indices)


def state_load(pool: Tensor, *, slots: Tensor) -> Tensor:
    """State of each request from pool [slots, ...] at slots int64 [batch]; slot -1 gives a fresh (zero) state."""
    y = _bytes(pool)[slots.clamp(min=0)]
    return y.masked_fill((slots < 0).reshape(-1, *[1] * (y.dim() - 1)), 0).view(pool.dtype)


def state_store(pool: Tensor, *, value: Tensor, slots: Tensor) -> None:
    """Writes value [batch, ...] into the slots int64 [batch] of pool [slots, ...]; slot -1 writes nothing."""
    rows, at = _written_rows(slots)
    _bytes(pool)[at] = _bytes(value[rows].to(pool.dtype))


def state_stored(pool: Tensor, *, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """(what is now in the pool at the slots, what must be there) after `state_store` with the same arguments."""
    rows, at = _written_rows(slots)
    return _bytes(pool)[at].view(pool.dtype), value[rows].to(pool.dtype)


def offload(pool: Tensor, *, host: Tensor, pages: Tensor, places: Tensor) -> None:
    """Copies `pages` int64 [n] of pool [pages, ...] to `places` int64 [n] of host memory [places, ...]."""
    _bytes(host)[places] = _bytes(pool)[pages].to(host.device)


def offloaded(pool: Tensor, *, host: Tensor, pages: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """(what is now on the host, what must be there) after `offload`, by page."""
    return _bytes(host)[places], _bytes(pool)[pages].to(host.device)


def reload(pool: Tensor, *, host: Tensor, pages: Tensor, places: Tensor) -> None:
    """Copies `places` int64 [n] of host memory [places, ...] to `pages` int64 [n] of pool [pages, ...]."""
    _bytes(pool)[pages] = _bytes(host)[places].to(pool.device)


def reloaded(pool: Tensor, *, host: Tensor, pages: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """(what is now on the device, what must be there) after `reload`, by page."""
    return _bytes(pool)[pages].to(host.device), _bytes(host)[places]


def copy(pool: Tensor, *, pages: Tensor, into: Tensor) -> None:
    """Copies `pages` int64 [n] of pool [pages, ...] to the pages `into` int64 [n] of the same pool, none of which is
    among `pages`: copy on write."""
    _bytes(pool)[into] = _bytes(pool)[pages]


def copied(pool: Tensor, *, pages: Tensor, into: Tensor) -> tuple[Tensor, Tensor]:
    """(what is now on the pages `into`, what must be there) after `copy`, by page."""
    return _bytes(pool)[into], _bytes(pool)[pages]


def rewrite(pool: Tensor, *, value: Tensor, pages: Tensor) -> None:
    """Writes value [n, ...] over whole `pages` int64 [n] of pool [pages, ...]: the same content in another scale."""
    _bytes(pool)[pages] = _bytes(value.to(pool.dtype))


def rewritten(pool: Tensor, *, value: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """(what is now on the pages, what must be there) after `rewrite`, by page."""
    return _bytes(pool)[pages], _bytes(value.to(pool.dtype))


def _written_rows(slots: Tensor) -> tuple[Tensor, Tensor]:
    rows = torch.nonzero(slots >= 0).flatten()
    return rows, slots[rows]


def _bytes(tensor: Tensor) -> Tensor:
    """8-bit floats as their bytes, since not every device indexes them; other dtypes as they are."""
    return tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.itemsize == 1 else tensor
