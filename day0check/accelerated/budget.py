"""How a budget of bytes becomes pools: state slots and the prefix workspace first, then pages and the snapshots that go
with them.

The bytes of a page and of a slot are those of the caches themselves, made without memory; nothing is estimated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from day0check.accelerated.cache import PAGED, STATES, Caches
from day0check.accelerated.records import Formats
from day0check.errors import UsageError
from reference.config import ModelConfig

MOST_ROWS = 16384  # of a prefix workspace that nobody has sized, and at most one byte in SHARE of the budget
SHARE = 16


@dataclass(frozen=True)
class Sizes:
    """Bytes over all layers: of a page of latents and index keys, and of the states of one request; and of a row of the
    prefix workspace, which all layers share (0 where none attends to a whole prefix)."""

    page: int
    state: int
    prefix_row: int = 0


@dataclass(frozen=True)
class Partition:
    """What was made of the budgets. `snapshots` is 0 without a prefix cache, `host_pages` without a host tier,
    `prefix_tokens` (rows of the prefix workspace) where no layer needs it."""

    pages: int
    slots: int
    snapshots: int
    host_pages: int
    sizes: Sizes
    prefix_tokens: int = 0

    @property
    def prefix_bytes(self) -> int:
        return self.prefix_tokens * self.sizes.prefix_row

    @property
    def device_bytes(self) -> int:
        pools = self.pages * self.sizes.page + (self.slots + self.snapshots) * self.sizes.state
        return pools + self.prefix_bytes

    @property
    def host_bytes(self) -> int:
        return self.host_pages * self.sizes.page + (self.slots * self.sizes.state if self.host_pages else 0)

    def __str__(self) -> str:
        text = f"{self.pages} pages of {self.sizes.page} bytes, {self.slots} slots"
        text += f" and {self.snapshots} snapshots" if self.snapshots else ""
        text += f" of {self.sizes.state} bytes"
        text += f", a prefix workspace of {self.prefix_tokens} rows: {self.prefix_bytes} bytes" * bool(
            self.prefix_tokens
        )
        text += f"; {self.device_bytes} bytes in all" if self.prefix_tokens else f": {self.device_bytes} bytes"
        return text + (f"; on the host {self.host_pages} pages: {self.host_bytes} bytes" if self.host_pages else "")


def sizes_of(config: ModelConfig, *, page: int, dtype: torch.dtype, formats: Formats | None = None) -> Sizes:
    """Bytes of a page of `page` positions and of a slot, from caches on the device "meta"."""
    like = {"dtype": dtype, "device": torch.device("meta"), "formats": formats, "prefix_tokens": 1}
    one = Caches(config, pages=1, page=page, slots=1, **like)

    def total(kinds: tuple[str, ...]) -> int:
        pools = [pool for kind in kinds for pool in getattr(one, kind).values()]
        return sum(math.prod(pool.shape) * pool.element_size() for pool in pools)

    return Sizes(total(PAGED), total(STATES), one.prefix.bytes)


def workspace_rows(
    sizes: Sizes, *, slots: int, positions: int, asked: int | None = None, cache_bytes: int | None = None
) -> int:
    """Rows of the prefix workspace: `asked`, or a part of the budget, a row of each request at least; never more than
    the `positions` that all pages hold."""
    if asked is None:
        share = cache_bytes // SHARE // sizes.prefix_row if cache_bytes is not None and sizes.prefix_row else MOST_ROWS
        asked = max(slots, min(MOST_ROWS, share))
    return min(asked, max(slots, positions))


def partition(
    sizes: Sizes,
    *,
    slots: int,
    longest: int,
    cache_bytes: int | None = None,
    pages: int | None = None,
    snapshot_blocks: int | None = None,
    host_bytes: int = 0,
    prefix_tokens: int = 0,
) -> Partition:
    """`cache_bytes` divided among `slots` requests of up to `longest` pages; without it as many pages as are asked for.

    `snapshot_blocks`: a snapshot for so many pages, None without a prefix cache. `prefix_tokens`: rows of the prefix
    workspace. Raises UsageError when the budget does not hold one request, the host's not a page, or the workspace not
    a row of each request, and says what would.
    """
    workspace = 0
    if sizes.prefix_row and prefix_tokens:
        if prefix_tokens < slots:
            raise UsageError(
                f"{prefix_tokens} rows hold none for each of {slots} requests",
                where="--prefix-workspace",
                todo=f"give at least {slots}, or lower --max-batch",
            )
        workspace = prefix_tokens
    fixed = slots * sizes.state + workspace * sizes.prefix_row
    blocks = snapshot_blocks or 1
    per_blocks = blocks * sizes.page + (sizes.state if snapshot_blocks else 0)  # in whole numbers: no page is lost
    if cache_bytes is not None:
        left = cache_bytes - fixed
        pages = min(left * blocks // per_blocks if per_blocks and left > 0 else 0, pages or (1 << 62))
        if pages < longest:
            need = fixed - (-longest * per_blocks // blocks)
            beside = f", {workspace} rows of a prefix workspace" if workspace else ""
            options = ["--max-batch", "--max-model-len", *(["--prefix-workspace"] if workspace else [])]
            raise UsageError(
                f"{cache_bytes} bytes hold {slots} states{beside} and {pages} pages, a request may need {longest}",
                where="--cache-bytes",
                todo=f"give at least {need}, or lower {' or '.join(options)}",
            )
        pages = min(pages, _useful(slots, longest, snapshot_blocks))
    elif pages is None:
        pages = slots * longest
    host_pages = 0
    if host_bytes:
        host_pages = max(0, host_bytes - slots * sizes.state) // max(1, sizes.page)
        if host_pages < 1:
            need = slots * sizes.state + sizes.page
            raise UsageError(f"{host_bytes} bytes hold no page", where="--host-bytes", todo=f"give at least {need}")
    snapshots = pages // snapshot_blocks if snapshot_blocks and sizes.state else 0
    return Partition(pages, slots, snapshots, host_pages, sizes, workspace)


def _useful(slots: int, longest: int, snapshot_blocks: int | None) -> int:
    """More pages than all requests at their longest are of use to a prefix cache alone."""
    return slots * longest if snapshot_blocks is None else 1 << 62
