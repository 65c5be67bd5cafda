"""What ranks give each other: N ranks, each with a part. Sums of parts are arithmetic, everything else moves bytes.

`group` is whoever knows the parts of all ranks: `group.parts(x, axis=, sizes=)` gives them in order of rank, and
`group.exchange(x, send=, receive=)` the rows that each rank sent here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from reference.rounding import Round, exact, wide


def all_reduce(parts: Tensor, *, round: Round = exact) -> Tensor:
    """Sum of the parts of all ranks, in order of rank: parts [rows, N, D] -> [rows, D] in their dtype.

    A ring that keeps its running sum in the activation type rounds it at every rank ("partial").
    """
    (terms,) = wide(parts)
    total = terms[:, 0]
    for term in terms.unbind(1)[1:]:
        total = round("partial", total + term)
    return round("out", total).to(parts.dtype)


def reduce_scatter(parts: Tensor, *, round: Round = exact) -> Tensor:
    """`all_reduce` for a rank's own rows alone: their parts of all ranks, parts [own rows, N, D] -> [own rows, D]."""
    return all_reduce(parts, round=round)


def all_gather(x: Tensor, *, group: Any, axis: int, sizes: tuple[int, ...]) -> Tensor:
    """`x` of every rank in order of rank, joined along `axis`, of which rank r has sizes[r]; bytes unchanged."""
    return torch.cat(group.parts(x, axis=axis, sizes=sizes), dim=axis)


def all_to_all(x: Tensor, *, group: Any, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
    """Rows of `x` [sum(send), ...] in runs for each rank -> the rows that each rank sent here, [sum(receive), ...]."""
    return group.exchange(x, send=send, receive=receive)
