"""Pools of P tokens of which the index keeps one key: which of them a step completes, and what waits for the next one.

Pool p of a request holds its positions p*P to p*P + P-1. A pool whose last token has not come is not whole: nobody sees
it, and the keys and gates of its tokens wait in a state of the request, [2, P-1, dI], in the order of their positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from day0check.accelerated.batch import Batch
from day0check.probe.rows import RowMap


@dataclass(frozen=True)
class PoolPlan:
    """The pools of one step, int64. "Both" are the rows that waited, [batch * (P-1)], followed by those of the step.

    `closed`: a row for each pool that becomes whole, by the position of its last token. `members` [closed, P] and
    `waiting` [batch, P-1] are numbers of both, -1 for none. `history` [batch, n]: the pools of each request that are
    whole after the step, padded to whole pages with -1. `visible` [rows]: how many pools a row sees.
    """

    closed: RowMap
    owner: Tensor  # [closed] the request of each pool
    number: Tensor  # [closed] which of its pools it is
    members: Tensor
    waiting: Tensor
    history: Tensor
    visible: Tensor


def plan_pools(batch: Batch, *, pool: int, page: int) -> PoolPlan:
    """The plan of `batch` for pools of `pool` tokens, `page` of them on a page."""
    device, count = batch.ids.device, len(batch.parts)
    places = torch.arange(pool)
    first_row = count * (pool - 1)
    owner, number, members, waiting, whole = [], [], [], [], []
    for b, part in enumerate(batch.parts):
        start, end = part.start, part.start + len(part.tokens)
        kept = torch.arange(start // pool, end // pool + 1)  # the pools that the step touches, the last one unfinished
        positions = kept.unsqueeze(1) * pool + places
        both = torch.where(positions < start, b * (pool - 1) + places, first_row + positions - start)
        both = both.masked_fill(positions >= end, -1)
        members.append(both[:-1])
        waiting.append(both[-1, : pool - 1])
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
