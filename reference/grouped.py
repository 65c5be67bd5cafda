"""Grouped-query attention (Ainslie et al. 2023): several query heads share one key and one value head."""

from __future__ import annotations

from torch import Tensor

from reference.attention import attention
from reference.rounding import Round, exact


def grouped_attention(
    q: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    owner: Tensor,
    visible: Tensor,
    scale: float,
    round: Round = exact,
) -> Tensor:
    """softmax(scale q k^T) v of each row over the first `visible[row]` keys of its own request.

    q [rows, H, d], keys [batch, n, Hk, d], values [batch, n, Hk, dv], owner and visible int64 [rows], H a multiple of
    Hk -> [rows, H, dv] in q's dtype. Query heads g * H / Hk to (g + 1) * H / Hk - 1 read key head g. Zeros for a row
    that sees no key. Raises ValueError when the key heads do not divide the query heads. Points as in `attention`.
    """
    heads, groups = q.shape[1], keys.shape[2]
    if heads % groups:
        raise ValueError(f"gqa.attention: {heads} query heads are no multiple of {groups} key heads")
    every = {"keys": keys.repeat_interleave(heads // groups, 2), "values": values.repeat_interleave(heads // groups, 2)}
    return attention(q, **every, owner=owner, visible=visible, scale=scale, round=round)
