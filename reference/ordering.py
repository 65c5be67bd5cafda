"""The one order in which scores are ranked, used by key selection, expert routing and sampling.

Larger is better, -0.0 equals 0.0, -inf is the worst number, NaN ranks behind every number, and among equal scores the
lower index wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

NEVER = -(2**63)  # rank of an entry that must not be chosen, below the rank of every score


def rank(scores: Tensor) -> Tensor:
    """int64 ranks with the order of the floating-point `scores` (any shape); NaN gets the lowest rank above NEVER.

    The bits of an IEEE number, read as a sign-magnitude integer, have its order.
    """
    bits = (scores.to(torch.float64) + 0.0).view(torch.int64)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 63) & 0x7FFF_FFFF_FFFF_FFFF)
    return ordered.masked_fill(torch.isnan(scores), NEVER + 1)


def best(ranks: Tensor, k: int) -> Tensor:
    """Mask of the k best entries of each row of `ranks` [rows, n], the lower index among equals; fewer if a row has
    fewer entries above NEVER."""
    n = ranks.shape[-1]
    chosen = ranks > NEVER
    if k >= n:
        return chosen
    if k == 0:
        return torch.zeros_like(chosen)
    last = ranks.topk(k, dim=-1).values[..., -1:]  # its value does not depend on how equals were broken
    above, equal = ranks > last, ranks == last
    missing = k - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= missing))) & chosen
