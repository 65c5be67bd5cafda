"""Pools whose memory a layout of the candidate owns, as tensors that the reference reads: only the rows of a call."""

from __future__ import annotations

from typing import Any

import torch

from day0check.probe.registry import OwnedPool


def logical(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments with every OwnedPool read through its layout, as it is now.

    A pool [pages, page, width] that goes with a `table` keeps the pages of the table, which then counts those; one that
    goes with `slots` [n] becomes a row for each of them, and the slots count the rows; one that goes with `pages` [n]
    keeps those, and they count themselves. Arguments without an OwnedPool come back as they are. Raises ValueError for
    a pool that goes with none of them, and whatever the layout raises.
    """
    name = next((n for n, value in arguments.items() if isinstance(value, OwnedPool)), None)
    if name is None:
        return arguments
    pool: OwnedPool = arguments[name]
    if arguments.get("table") is not None:
        return arguments | _pages(pool, name, arguments["table"])
    if arguments.get("slots") is not None:
        return arguments | _rows(pool, name, arguments["slots"])
    if arguments.get("pages") is not None:
        return arguments | _whole_pages(pool, name, arguments["pages"])
    raise ValueError(f"{name} has a layout of its own and comes with no table, slots or pages")


def _pages(pool: OwnedPool, name: str, table: torch.Tensor) -> dict[str, Any]:
    used = table[table >= 0].unique()
    places = torch.arange(pool.page, device=table.device)
    rows = pool.read((used.unsqueeze(1) * pool.page + places).flatten())
    renumbered = torch.where(table >= 0, torch.searchsorted(used, table.contiguous()), table)
    return {name: rows.unflatten(0, (-1, pool.page)), "table": renumbered}


def _rows(pool: OwnedPool, name: str, slots: torch.Tensor) -> dict[str, Any]:
    rows = pool.read(slots.clamp(min=0))
    if len(pool.row) == 1:  # paged memory: pages of one row
        rows = rows.unsqueeze(1)
    return {name: rows, "slots": torch.where(slots >= 0, torch.arange(len(slots), device=slots.device), -1)}


def _whole_pages(pool: OwnedPool, name: str, pages: torch.Tensor) -> dict[str, Any]:
    places = torch.arange(pool.page, device=pages.device)
    rows = pool.read((pages.unsqueeze(1) * pool.page + places).flatten())
    rows = rows if pool.page == 1 else rows.unflatten(0, (-1, pool.page))
    return {name: rows, "pages": torch.arange(len(pages), device=pages.device)}
