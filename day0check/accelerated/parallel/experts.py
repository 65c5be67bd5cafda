"""Routed experts over ranks: each (row, expert) pair is computed once, on a rank that holds the expert.

Two ways. "all_to_all": a rank routes its share of the rows, sends each pair to a rank with its expert and gets the
result back. "reduce": every rank routes all rows, computes the pairs that are its own, and the sums are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from day0check.accelerated import layers
from day0check.accelerated.parallel.group import Group
from day0check.accelerated.parallel.layout import Placement, cut
from day0check.accelerated.parallel.pace import Pace
from day0check.accelerated.weights import Moe
from day0check.probe.recorder import Here

if TYPE_CHECKING:
    from day0check.accelerated.layers import Step


@dataclass(frozen=True)
class Pairs:
    """The pairs that this rank sends, in the order in which they go, and how many go to and come from each rank."""

    which: Tensor  # [sent] numbers of the pairs as `moe.dispatch` sorted them
    send: tuple[int, ...]
    receive: tuple[int, ...]


def exchanged(step: Step, at: Here, x: Tensor, p: Moe, *, group: Group, placement: Placement) -> Tensor:
    """The routed part [rows, D] of a sublayer; `x` [rows, D] is on every rank, each routes its share of the rows.

    Where the rows are laid over ranks, `x` and what is given are this rank's share.
    """
    spread = step.ranks.spread
    shares = cut(x.shape[0], group.size) if spread is None else spread.shares
    start, stop = shares[group.rank]
    share = x[start:stop] if spread is None else x
    pace = Pace(step.caller.recorder)
    rows = step.batch.rows.take(range(start, stop)) if step.watched() else None
    mine, k = stop > start, step.config.moe.topk
    pairs, order, ids = x[:0], None, torch.empty(0, dtype=torch.int64, device=x.device)
    if mine:
        chosen, weights, inner = layers.route(step, at, share, p, rows)
        pairs, order, _, _ = at("moe.dispatch", inner, row_map=rows, ids=chosen, experts=len(placement.owners))
        ids = chosen.flatten()[order]
    elif p.down is not None:
        pairs = x.new_empty(0, p.down.shape[0])
    pace.stage()
    plan = send_plan(ids, placement.nearest(group.rank), group)
    numbers = torch.stack((ids[plan.which], _rows_of(order, plan.which, k, start)), 1)
    sent = {"group": group, "send": plan.send, "receive": plan.receive}
    # a row map of pairs: that of the rows which they come from
    sent_rows = step.batch.rows.take(numbers[:, 1].tolist()) if step.watched() else None
    received_numbers = at("comm.all_to_all", numbers, site="ids", row_map=sent_rows, **sent)
    received = at("comm.all_to_all", pairs[plan.which], site="dispatch", row_map=sent_rows, **sent)
    pace.stage()
    result = _computed_here(step, at, p, received, received_numbers)
    pace.stage()
    back_rows = step.batch.rows.take(received_numbers[:, 1].tolist()) if step.watched() else None
    back = {"group": group, "send": plan.receive, "receive": plan.send}
    returned = at("comm.all_to_all", result, site="combine", row_map=back_rows, **back)
    y = x[:0]
    if mine:
        in_order = torch.empty_like(returned)
        in_order[plan.which] = returned
        y = at("moe.combine", in_order, row_map=rows, order=order, weights=weights)
        y = layers.routed_output(step, at, p, y, rows)
    pace.stage()
    if spread is not None:
        return y
    sizes = tuple(b - a for a, b in shares)
    return at("comm.all_gather", y, site="rows", row_map=rows, group=group, axis=0, sizes=sizes)


def send_plan(ids: Tensor, nearest: Sequence[int], group: Group) -> Pairs:
    """Which pairs go where: `ids` int64 [pairs] the expert of each, `nearest` the rank for each expert."""
    to = torch.tensor(nearest, dtype=torch.int64, device=ids.device)[ids]
    send = tuple(torch.bincount(to, minlength=group.size).tolist())
    return Pairs(torch.argsort(to, stable=True), send, tuple(group.counts(send)))


def _rows_of(order: Tensor | None, which: Tensor, k: int, first: int) -> Tensor:
    """Numbers of the rows in the step that pairs belong to; the share of this rank begins with row `first`."""
    return which if order is None else order[which].div(k, rounding_mode="floor") + first


def _computed_here(step: Step, at: Here, p: Moe, received: Tensor, numbers: Tensor) -> Tensor:
    """Results of the received pairs [n, L] in the order in which they came; `numbers` [n, 2]: expert and row."""
    if received.shape[0] == 0:
        return received
    rows = step.batch.rows.take(numbers[:, 1].tolist()) if step.watched() else None
    experts = step.config.moe.experts
    ids = numbers[:, :1].contiguous()
    pairs, order, active, offsets = at(
        "moe.dispatch", received, site="received", row_map=rows, ids=ids, experts=experts
    )
    sorted_rows = None if rows is None else rows.take(order.tolist())
    y = layers.computed(step, at, p, pairs, active, offsets, sorted_rows)
    result = torch.empty_like(y)
    result[order] = y
    return result


def owned(step: Step, at: Here, x: Tensor, p: Moe, *, rank: int, placement: Placement) -> Tensor:
    """This rank's part [rows, L] of the sums over experts, every rank routing all rows of `x` [rows, D]."""
    pace = Pace(step.caller.recorder)
    ids, weights, inner = layers.route(step, at, x, p)
    mine = torch.where(owner_of(ids, placement) == rank, ids, -1)
    pace.stage()
    y = inner.new_zeros(inner.shape)
    if bool((mine >= 0).any()):
        y = layers.combined(step, at, p, inner, mine, weights)
    pace.stage()
    return y


def owner_of(ids: Tensor, placement: Placement) -> Tensor:
    """The rank that computes each choice `ids` [rows, k]: replicas of an expert take the rows in turn."""
    turns = placement.most_replicas
    table = torch.tensor([placement.in_turn(turn) for turn in range(turns)], device=ids.device)
    row = torch.arange(ids.shape[0], device=ids.device).remainder(turns)
    return table[row.unsqueeze(1), ids]
