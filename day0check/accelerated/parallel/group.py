"""What ranks say to each other: bytes gathered from all, and bytes from each to each. No arithmetic is done on the way.

`Group` is what operators see; a transport carries bytes. `ProcessTransport`: torch.distributed (gloo, NCCL);
`ThreadTransport`: ranks that are threads of one process, for tests and examples.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Transport(Protocol):
    rank: int
    size: int

    def gather(self, data: Tensor) -> list[Tensor]:
        """uint8 [n] of this rank, n the same on all: that of every rank in order."""

    def exchange(self, data: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """uint8 [sum(send)], cut by `send` for each rank in order: what all of them sent here, [sum(receive)]."""


@dataclass(frozen=True)
class Group:
    """The ranks among which an axis is cut, as one of them sees it. `name`: "tp" or "ep", as in dims strings."""

    name: str
    transport: Transport

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def size(self) -> int:
        return self.transport.size

    def parts(self, x: Tensor, *, axis: int, sizes: Sequence[int]) -> list[Tensor]:
        """`x` of every rank in order; they differ only in the length of `axis`, which is sizes[rank].

        Raises ValueError when the own length is another one.
        """
        if x.shape[axis] != sizes[self.rank]:
            raise ValueError(f"rank {self.rank} has {x.shape[axis]} along axis {axis} where {sizes[self.rank]} are due")
        shapes = [list(x.shape) for _ in sizes]
        for shape, length in zip(shapes, sizes, strict=True):
            shape[axis] = length
        counts = [torch.Size(shape).numel() * x.element_size() for shape in shapes]
        data = _bytes(x)
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=x.device)
        padded[: data.numel()] = data
        found = self.transport.gather(padded)
        return [_typed(f[:n], x.dtype).view(s) for f, n, s in zip(found, counts, shapes, strict=True)]

    def exchange(self, x: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Rows of `x` [sum(send), ...], in runs for each rank in order: the rows that came, [sum(receive), ...]."""
        width = x[:0].new_empty(1, *x.shape[1:]).numel() * x.element_size()
        found = self.transport.exchange(_bytes(x), [n * width for n in send], [n * width for n in receive])
        return _typed(found, x.dtype).view(sum(receive), *x.shape[1:])

    def counts(self, send: Sequence[int]) -> list[int]:
        """How many rows every rank sends here, when this one sends `send` to each."""
        mine = torch.tensor(list(send), dtype=torch.int64)
        table = self.parts(mine, axis=0, sizes=[self.size] * self.size)
        return [int(row[self.rank]) for row in table]


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    return data.clone().view(dtype)  # a clone: an offset in the received bytes need not fit the type


class ProcessTransport:
    """Ranks that are processes, by `torch.distributed`. `device`: where collectives want their memory."""

    def __init__(self, process_group: Any, *, device: torch.device) -> None:
        import torch.distributed as dist

        self._group, self._device = process_group, device
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)

    def gather(self, data: Tensor) -> list[Tensor]:
        import torch.distributed as dist

        moved = data.to(self._device)
        found = [torch.empty_like(moved) for _ in range(self.size)]
        dist.all_gather(found, moved, group=self._group)
        return [f.to(data.device) for f in found]

    def exchange(self, data: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        import torch.distributed as dist

        moved = data.to(self._device)
        found = torch.empty(sum(receive), dtype=torch.uint8, device=self._device)
        dist.all_to_all_single(found, moved, list(receive), list(send), group=self._group)
        return found.to(data.device)


class ThreadTransport:
    """Ranks that are threads of this process: `ThreadTransport.make(size)` gives one for each."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    @staticmethod
    def make(size: int, *, timeout_s: float = 60.0) -> list[ThreadTransport]:
        board, barrier = [None] * size, threading.Barrier(size, timeout=timeout_s)
        return [ThreadTransport(rank, size, board, barrier) for rank in range(size)]

    def abort(self) -> None:
        """Lets every rank that waits raise threading.BrokenBarrierError."""
        self._barrier.abort()

    def _share(self, value: Any) -> list[Any]:
        self._board[self.rank] = value
        self._barrier.wait()
        found = list(self._board)
        self._barrier.wait()
        return found

    def gather(self, data: Tensor) -> list[Tensor]:
        return [found.clone() for found in self._share(data.clone())]

    def exchange(self, data: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        bounds = [0, *itertools.accumulate(send)]
        pieces = self._share([data[a:b].clone() for a, b in itertools.pairwise(bounds)])
        mine = [sent[self.rank] for sent in pieces]
        if [len(piece) for piece in mine] != list(receive):
            raise ValueError(f"rank {self.rank} awaits {list(receive)} bytes and gets {[len(p) for p in mine]}")
        return torch.cat(mine)
