"""Pools of P tokens of which the index keeps one key: which of them a step completes, and what waits for the next one.

Pool p of a request holds its positions p*P to p*P + P-1. A pool whose last token has not come is not whole: nobody sees
it, and the keys and gates of its tokens wait in a state of the request, [2, P-1, dI], in the order of their positions.
Where pools overlap, a key is made of the pool before as well, whose P tokens wait in front of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from day0check.accelerated.batch import Batch
from day0check.probe.rows import RowMap


@dataclass(frozen=True)
class PoolPlan:
    """The pools of one step, int64. "Both" are the rows that waited, [batch * W], followed by those of the step; W is
    P-1, and 2P-1 where pools overlap.

    `closed`: a row for each pool that becomes whole, by the position of its last token. `members` [closed, P], or
    [closed, 2P] with those of the pool before in front, and `waiting` [batch, W] are numbers of both, -1 for none.
    `history` [batch, n]: the pools of each request that are whole after the step, padded to whole pages with -1.
    `visible` [rows]: how many pools a row sees.
    """

    closed: RowMap
    owner: Tensor  # [closed] the request of each pool
    number: Tensor  # [closed] which of its pools it is
    members: Tensor
    waiting: Tensor
    history: Tensor
    visible: Tensor


def plan_pools(batch: Batch, *, pool: int, page: int, overlap: bool = False) -> PoolPlan:
    """The plan of `batch` for pools of `pool` tokens, `page` of them on a page."""
    reach = pool if overlap else 0  # tokens before a pool that are part of it
    kept_rows = reach + pool - 1
    device, count = batch.ids.device, len(batch.parts)
    places = torch.arange(-reach, pool)
    first_row = count * kept_rows
    owner, number, members, waiting, whole = [], [], [], [], []
    for b, part in enumerate(batch.parts):
        start, end = part.start, part.start + len(part.tokens)
        kept = torch.arange(start // pool, end // pool + 1)  # the pools that the step touches, the last one unfinished
        positions = kept.unsqueeze(1) * pool + places
        waited = b * kept_rows + positions - (start // pool * pool - reach)
        both = torch.where(positions < start, waited, first_row + positions - start)
        both = both.masked_fill((positions < 0) | (positions >= end), -1)
        members.append(both[:-1])
        waiting.append(both[-1, :kept_rows])
        owner += [b] * (len(kept) - 1)
        number += kept[:-1].tolist()
        whole.append(end // pool)
        first_row += len(part.tokens)
    columns = torch.arange(batch.table.shape[1] * page, device=device)
    last = tuple((n + 1) * pool - 1 for n in number)
    return PoolPlan(
        closed=RowMap(batch.rows.requests, tuple(owner), last),
        owner=torch.tensor(owner, dtype=torch.int64, device=device),
        number=torch.tensor(number, dtype=torch.int64, device=device),
        members=torch.cat(members).to(device),
        waiting=torch.stack(waiting).to(device),
        history=torch.where(columns < torch.tensor(whole, device=device).unsqueeze(1), columns, -1),
        visible=batch.visible.div(pool, rounding_mode="floor"),
    )
