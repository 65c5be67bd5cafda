"""What reaches the device of a step's input: the same numbers."""

from __future__ import annotations

from torch import Tensor


def stage(
    ids: Tensor,
    *,
    positions: Tensor,
    owner: Tensor,
    offsets: Tensor,
    table: Tensor,
    lengths: Tensor,
    load_slots: Tensor,
    store_slots: Tensor,
    on: Tensor,
) -> tuple[Tensor, ...]:
    """Every array on the device of the empty tensor `on`: ids, positions and owner [rows], offsets [batch + 1], table
    [batch, pages], lengths, load_slots and store_slots [batch], all int64."""
    arrays = (ids, positions, owner, offsets, table, lengths, load_slots, store_slots)
    return tuple(array.to(on.device) for array in arrays)
