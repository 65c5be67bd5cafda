"""Which tokens make the key of each pool of an index that keeps one key for P tokens (GLM-5.3, DeepSeek-V4)."""

from __future__ import annotations

import torch
from torch import Tensor


def pool_members(rows: Tensor, *, pool: int, previous: int, absent: float) -> Tensor:
    """Rows of the tokens that make the key of each whole pool, in order of their positions.

    rows [previous + n, lanes, dI] -> [n // pool, lanes * pool, dI]. With one lane a pool is made of its own tokens.
    With two it is made of the tokens of the pool before, in their lane 0, and then of its own, in lane 1; `previous`
    (0 or `pool`) rows belong to the pool before the first one here, and without them that pool is `absent` values.
    """
    count = (rows.shape[0] - previous) // pool * pool
    own = rows[previous : previous + count, -1].unflatten(0, (-1, pool))
    if rows.shape[1] == 1:
        return own
    before = rows[:, 0]
    if not previous:
        before = torch.cat([rows.new_full((pool, rows.shape[2]), absent), before])
    return torch.cat([before[:count].unflatten(0, (-1, pool)), own], dim=1)
