"""How many ranks there are and what each of them holds. Standard library only.

Tensor parallel (`tensor` ranks): attention and KDA heads, columns of MLPs and of the shared expert, and the vocabulary
of the head are cut; latents, the index, norms, the router and the vision tower are on every rank. Expert parallel
(`expert` ranks): every rank holds some experts whole. Both are laid over the same ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from day0check.errors import UsageError

TENSOR, EXPERT, DISPATCH, REDUNDANT = "tensor_parallel", "expert_parallel", "expert_dispatch", "redundant_experts"
SUMS = "sums"
KEYS = (TENSOR, EXPERT, DISPATCH, REDUNDANT, SUMS)
TRANSPORTS = ("all_to_all", "reduce")
SUMMED = ("all_reduce", "reduce_scatter")
MOST_RANKS = 64
Range = tuple[int, int]


@dataclass(frozen=True)
class Layout:
    """`tensor` and `expert` ranks over the same processes.

    `dispatch` "all_to_all": each rank routes its share of the rows and sends their pairs to the experts' ranks;
    "reduce": every rank routes all rows, computes the pairs of its own experts, and the sums are reduced.
    `redundant`: so many experts, the first ones, have a replica on the next rank. `sums` "all_reduce": every rank gets
    every sum of tensor parallel parts; "reduce_scatter": each gets those of its share of the rows, and holds the
    residual spine of these alone.
    """

    tensor: int = 1
    expert: int = 1
    dispatch: Literal["all_to_all", "reduce"] = "all_to_all"
    redundant: int = 0
    sums: Literal["all_reduce", "reduce_scatter"] = "all_reduce"

    @property
    def world(self) -> int:
        return max(self.tensor, self.expert)


def layout_of(settings: Mapping[str, Any]) -> Layout:
    """The layout in the settings of a run; other keys are left alone. Raises UsageError for one that cannot be."""
    tensor, expert, redundant = (
        int(settings.get(key, least)) for key, least in ((TENSOR, 1), (EXPERT, 1), (REDUNDANT, 0))
    )
    dispatch, sums = settings.get(DISPATCH, "all_to_all"), settings.get(SUMS, "all_reduce")
    for option, count in (("--tp", tensor), ("--ep", expert)):
        if not 1 <= count <= MOST_RANKS:
            raise UsageError(f"{count} ranks", where=option, todo=f"give 1 to {MOST_RANKS}")
    if tensor != expert and 1 not in (tensor, expert):
        todo = "give both the same number of ranks, or leave one of them out"
        raise UsageError(
            f"{tensor} tensor and {expert} expert parallel ranks do not fit", where="--tp, --ep", todo=todo
        )
    if dispatch not in TRANSPORTS:
        raise UsageError(f"there is no {dispatch!r}", where=DISPATCH, todo=f"known: {', '.join(TRANSPORTS)}")
    if redundant < 0 or (redundant and expert == 1):
        raise UsageError(f"{redundant} redundant experts", where=REDUNDANT, todo="they need more than one rank: --ep 2")
    if sums not in SUMMED:
        raise UsageError(f"there is no {sums!r}", where=SUMS, todo=f"known: {', '.join(SUMMED)}")
    if sums != "all_reduce" and tensor == 1:
        raise UsageError("there are no sums of tensor parallel parts", where="--sums", todo="it needs ranks: --tp 2")
    return Layout(tensor, expert, dispatch, redundant, sums)


def cut(count: int, parts: int, *, unit: int = 1) -> tuple[Range, ...]:
    """`count` things, in whole units of `unit`, over `parts` ranks: the first ranks have one unit more where it does
    not come out even. Every thing is in exactly one range."""
    units = -(-count // unit)
    each, more = divmod(units, parts)
    found, start = [], 0
    for rank in range(parts):
        stop = start + (each + (rank < more)) * unit
        found.append((min(start, count), min(stop, count)))
        start = stop
    return tuple(found)


@dataclass(frozen=True)
class Placement:
    """Which ranks hold which experts. `owners[e]`: the ranks that hold expert e, the first one its home."""

    owners: tuple[tuple[int, ...], ...]
    ranks: int

    def held_by(self, rank: int) -> tuple[int, ...]:
        """The experts on a rank, in ascending order: the order of its stacks."""
        return tuple(expert for expert, ranks in enumerate(self.owners) if rank in ranks)

    def nearest(self, rank: int) -> tuple[int, ...]:
        """For each expert the rank to which `rank` sends its pairs: itself where it holds a replica."""
        return tuple(rank if rank in ranks else ranks[0] for ranks in self.owners)

    def in_turn(self, row: int) -> tuple[int, ...]:
        """For each expert the rank that computes row number `row` where all ranks have all rows: replicas take turns.
        It depends on nothing that differs between ranks."""
        return tuple(ranks[row % len(ranks)] for ranks in self.owners)

    @property
    def most_replicas(self) -> int:
        return max(len(ranks) for ranks in self.owners)


def place_experts(experts: int, ranks: int, *, redundant: int = 0) -> Placement:
    """Experts in runs over the ranks; the first `redundant` of them also on the rank after their home.

    Raises UsageError when a rank would have none, or there are more replicas than experts.
    """
    if experts < ranks or redundant > experts:
        what = f"{experts} experts on {ranks} ranks, {redundant} of them twice"
        raise UsageError(what, where="--ep", todo="give fewer ranks or replicas")
    home = [rank for rank, (start, stop) in enumerate(cut(experts, ranks)) for _ in range(start, stop)]
    owners = tuple((r, (r + 1) % ranks) if e < redundant else (r,) for e, r in enumerate(home))
    return Placement(owners, ranks)
