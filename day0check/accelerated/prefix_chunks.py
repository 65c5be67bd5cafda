"""A prompt that goes on behind a long prefix: its keys come chunk by chunk through one workspace of a set size.

Each chunk is gathered from the pages of all requests of the step and attended to, the keys of the step itself are a
part of their own, and the parts are merged by their log-sum-exps. A request whose prefix is shorter than its
neighbour's has empty parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from day0check.accelerated.pool_memory import new_pool
from day0check.probe.recorder import Here

if TYPE_CHECKING:
    from day0check.accelerated.batch import Batch
    from day0check.accelerated.layers import Step

LEAST_TOKENS = 512  # of a workspace that nobody has sized


def default_tokens(chunk: int | None) -> int:
    """Tokens of a workspace that nobody has sized, for steps of up to `chunk` prompt rows: twice as many keys as the
    step has of its own."""
    return max(LEAST_TOKENS, 2 * (chunk or 0))


def row_bytes(rows: Iterable[tuple[int, torch.dtype]]) -> int:
    """Bytes of the widest of `rows`, (width, type) of the latents of each layer that attends to all of them."""
    return max((width * dtype.itemsize for width, dtype in rows), default=0)


class PrefixWorkspace:
    """Memory for `tokens` rows of the widest dense latent cache, allocated once for all layers.

    No tokens where no layer attends to a whole prefix. What it holds before anybody writes is `memory`, as of pools.
    `prescribed`: whether a schedule asks for its size, so that even a kernel that reads pages itself gives way to it.
    """

    prescribed = False

    def __init__(
        self, rows: Iterable[tuple[int, torch.dtype]], *, tokens: int, device: torch.device, memory: str = ""
    ) -> None:
        size = row_bytes(rows)
        self.tokens = tokens if size else 0
        kind = "" if memory == "strided" else memory  # views of it are cut to each layer's rows
        self.memory = new_pool((self.tokens * size,), dtype=torch.uint8, device=device, memory=kind)

    @property
    def bytes(self) -> int:
        return self.memory.numel()

    def rows(self, shape: torch.Size, width: int, dtype: torch.dtype) -> Tensor:
        """[requests, n, width] of `dtype` for the chunk of `shape` [requests, n]; good until it is taken again."""
        return self.memory[: shape.numel() * width * dtype.itemsize].view(dtype).view(*shape, width)


@dataclass(frozen=True)
class Keys:
    """A part of the keys: `indices` [batch, n] their positions in each request, -1 for none; `visible` [rows] how many
    of them a row sees. int64."""

    indices: Tensor
    visible: Tensor


@dataclass(frozen=True)
class PrefixPlan:
    """The chunks of the prefixes in front of a step's rows, and the keys of the step itself."""

    chunks: tuple[Keys, ...]
    own: Keys


def plan_prefix(batch: Batch, *, tokens: int, page: int) -> PrefixPlan | None:
    """How a step attends through a workspace of `tokens` rows; None where every prefix fits it whole.

    The workspace is divided evenly among the requests of the step, in whole pages where there is room for one. Single
    tokens of a decode step read their pages as they lie.
    """
    starts = [part.start for part in batch.parts]
    room = tokens // len(starts)
    room = room // page * page or room
    longest = max(starts)
    if batch.phase != "prefill" or not room or longest <= room:
        return None
    device, real = batch.ids.device, batch.owner.clamp(min=0)
    start = torch.tensor(starts, device=device)
    end = torch.tensor([part.start + len(part.tokens) for part in batch.parts], device=device)
    chunks = []
    for begin in range(0, longest, room):
        places = torch.arange(begin, min(begin + room, longest), device=device)
        indices = torch.where(places < start.unsqueeze(1), places, -1)
        chunks.append(Keys(indices, (start - begin).clamp(0, len(places))[real]))
    places = start.unsqueeze(1) + torch.arange(max(len(part.tokens) for part in batch.parts), device=device)
    own = Keys(torch.where(places < end.unsqueeze(1), places, -1), batch.visible - start[real])
    return PrefixPlan(tuple(chunks), own)


def attend(
    step: Step, at: Here, layer: int, q: Tensor, split: Callable[[Tensor], tuple[Tensor, Tensor]], *, scale: float
) -> Tensor:
    """Attention of `q` [rows, H, d] on every key of the row's request, part by part: [rows, H, dv].

    `split` gives keys [batch, n, Hk, d] and values [batch, n, Hk, dv] of gathered rows [batch, n, ...] of the pool.
    """
    batch, pool, plan, found = step.batch, step.caches.kv[layer], step.prefix, []
    pages = {"table": batch.table, "owner": batch.every}

    def part(rows: Tensor, seen: Keys, site: str) -> None:
        keys, values = split(rows)
        given = {"keys": keys, "values": values, "owner": batch.owner, "visible": seen.visible}
        found.append(at("mla.partial", q, site=site, **given, scale=scale))

    for chunk in plan.chunks:
        space = step.caches.prefix.rows(chunk.indices.shape, _width(pool), pool.dtype)
        rows = at("prefix.gather", pool, row_map=batch.requests, **pages, indices=chunk.indices, out=space)
        part(rows, chunk, "prefix")
    part(at("kv.gather", pool, row_map=batch.requests, **pages, indices=plan.own.indices), plan.own, "own")
    parts, lse = (torch.stack(each, 1) for each in zip(*found, strict=True))
    return at("mla.merge", parts, lse=lse)


def _width(pool: Tensor) -> int:
    """Values of a row of a pool, whoever owns its memory."""
    return pool.shape[2] if isinstance(pool, Tensor) else pool.row[-1]
