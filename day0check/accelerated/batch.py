"""One step as tensors: which rows of which requests, where their memory lies, and whose logits are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from day0check.probe.rows import RowMap


@dataclass(frozen=True)
class Part:
    """The rows of one request in a step: tokens at positions start .. start + len(tokens) - 1."""

    request: str
    tokens: tuple[int, ...]
    start: int
    table: tuple[int, ...]
    slot: int
    wants_logits: bool  # of its last row
    temperature: float = 0.0
    seed: int = 0
    pads_before: int = 0  # media pads of the request before these rows
    every_logits: bool = False  # of all its rows, whether or not a token is chosen after the last
    before: tuple[int, ...] = ()  # the tokens at positions 0 .. start - 1, where the model's positions need them


@dataclass(frozen=True)
class Batch:
    """`owner`, `positions`, `visible` [rows]; `offsets` [batch+1]; `table` [batch, pages]; `history` [batch, n] holds
    the positions 0 .. length-1 of each request, padded to whole pages with -1. All int64."""

    phase: str
    parts: tuple[Part, ...]
    rows: RowMap
    requests: RowMap  # one row a request: its last row
    wanted: tuple[int, ...]  # rows whose logits are wanted
    choosing: tuple[int, ...]  # places in `wanted` after which a token is chosen
    ids: Tensor
    positions: Tensor
    visible: Tensor
    owner: Tensor
    offsets: Tensor
    every: Tensor  # 0 .. batch-1
    table: Tensor
    history: Tensor
    load_slots: Tensor  # -1 for a request that begins here
    store_slots: Tensor


def make_batch(phase: str, parts: Sequence[Part], *, page: int, device: torch.device) -> Batch:
    """The step of `parts`, rows in the order given."""
    names = tuple(part.request for part in parts)
    counts = [len(part.tokens) for part in parts]
    ends = [part.start + count for part, count in zip(parts, counts, strict=True)]
    owner = [b for b, count in enumerate(counts) for _ in range(count)]
    positions = [p for part, end in zip(parts, ends, strict=True) for p in range(part.start, end)]
    offsets = [0]
    for count in counts:
        offsets.append(offsets[-1] + count)
    pages = max(-(-end // page) for end in ends)
    at = torch.tensor(positions, device=device)
    places = torch.arange(pages * page, device=device)
    lengths = torch.tensor(ends, device=device).unsqueeze(1)
    table = [[*part.table[:pages], *[-1] * (pages - len(part.table))] for part in parts]
    every = tuple(range(len(parts)))
    wanted, choosing = [], []
    for part, begin, end in zip(parts, offsets, offsets[1:], strict=False):
        wanted += range(begin, end) if part.every_logits else [end - 1] * part.wants_logits
        choosing += [len(wanted) - 1] * part.wants_logits
    return Batch(
        phase=phase,
        parts=tuple(parts),
        rows=RowMap(names, tuple(owner), tuple(positions)),
        requests=RowMap(names, every, tuple(end - 1 for end in ends)),
        wanted=tuple(wanted),
        choosing=tuple(choosing),
        ids=torch.tensor([token for part in parts for token in part.tokens], device=device),
        positions=at,
        visible=at + 1,
        owner=torch.tensor(owner, device=device),
        offsets=torch.tensor(offsets, device=device),
        every=torch.tensor(every, device=device),
        table=torch.tensor(table, device=device),
        history=torch.where(places < lengths, places, -1),
        load_slots=torch.tensor([part.slot if part.start else -1 for part in parts], device=device),
        store_slots=torch.tensor([part.slot for part in parts], device=device),
    )
