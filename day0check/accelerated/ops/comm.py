"""Between ranks: bytes are gathered or exchanged as they are, sums of parts are taken on every rank in order of rank.

A sum over gathered parts is the same on every rank to the bit, whatever the ranks' own order of arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from day0check.accelerated.ops.arithmetic import wide


def all_reduce(parts: Tensor) -> Tensor:
    """Sum over the ranks of `parts` [rows, N, D], float32 inside, rounded once: [rows, D]."""
    return wide(parts).sum(1).to(parts.dtype)


def reduce_scatter(parts: Tensor) -> Tensor:
    """Sum over the ranks of the parts of this rank's own rows, as `all_reduce`: [own rows, N, D] -> [own rows, D]."""
    return wide(parts).sum(1).to(parts.dtype)


def all_gather(x: Tensor, *, group: Any, axis: int, sizes: Sequence[int]) -> Tensor:
    """`x` of every rank of `group` in order, joined along `axis`; rank r has sizes[r] there."""
    return torch.cat(group.parts(x, axis=axis, sizes=sizes), axis)


def all_to_all(x: Tensor, *, group: Any, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Rows of `x` [sum(send), ...] in runs for each rank; the rows that came from each, [sum(receive), ...]."""
    return group.exchange(x, send=send, receive=receive)
