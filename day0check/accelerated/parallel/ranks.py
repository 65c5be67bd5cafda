"""One rank of a model that is cut over several: its weights, and the calls that bring the pieces together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from day0check.accelerated import layers
from day0check.accelerated.parallel import experts
from day0check.accelerated.parallel.dims import dims_of
from day0check.accelerated.parallel.group import Group, Transport
from day0check.accelerated.parallel.layout import Layout, Placement, cut
from day0check.accelerated.parallel.shard import ShardReader, Shares
from day0check.accelerated.parallel.spread import Spread, spread
from day0check.accelerated.weights import Model, Moe, read_model
from day0check.probe.recorder import Here
from day0check.probe.rows import RowMap
from reference.config import ModelConfig
from reference.weights import Checkpoint

if TYPE_CHECKING:
    from day0check.accelerated.layers import Step


class Ranks:
    """What this rank shares with the others of `layout`; `read` comes first."""

    reader: type[ShardReader] = ShardReader

    def __init__(self, layout: Layout, transport: Transport) -> None:
        if transport.size != layout.world:
            raise ValueError(f"{transport.size} ranks are there, the layout has {layout.world}")
        self.layout, self.transport = layout, transport
        self.tensor = Group("tp", transport) if layout.tensor > 1 else None
        self.expert = Group("ep", transport) if layout.expert > 1 else None
        self.shares: Shares | None = None
        self.spread: Spread | None = None  # how the rows of the present step lie over ranks, None where all have all
        self._number: Tensor | None = None  # of each expert in the stacks of this rank, -1 where it has none

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def placement(self) -> Placement | None:
        """Which ranks hold which experts; None where every rank has a part of all."""
        return None if self.shares is None else self.shares.placement

    def read(self, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device) -> tuple[Model, ModelConfig]:
        """The weights of this rank and the configuration that fits them.

        Raises Unavailable for a model that cannot be cut so, and what `read_model` raises.
        """
        self.shares = Shares(checkpoint.config, self.layout, self.rank)
        reader = self.reader(checkpoint, dtype, device, shares=self.shares)
        model = reader.finished(read_model(checkpoint, dtype=dtype, device=device, read=reader))
        if self.placement is not None:
            held = self.shares.held_experts()
            self._number = torch.full((len(self.placement.owners),), -1, dtype=torch.int64, device=device)
            self._number[list(held)] = torch.arange(len(held), device=device)
        return model, reader.config

    def dims(self, place: str, operator: str, site: str) -> str:
        """How the results of an operator are cut: what a recorder asks."""
        return dims_of(self.layout, place, operator, site, spread=self.spread is not None)

    @contextlib.contextmanager
    def laid(self, rows: RowMap, count: int) -> Iterator[Spread | None]:
        """Lays the `count` rows of a step over ranks for its duration, where the layout scatters sums."""
        wanted = self.tensor is not None and self.layout.sums == "reduce_scatter"
        self.spread = spread(self.tensor, rows, count) if wanted else None
        try:
            yield self.spread
        finally:
            self.spread = None

    def reduced(self, at: Here, y: Tensor, site: str) -> Tensor:
        """The sum over ranks of the parts `y` [rows, D], of this rank's rows where they are laid over ranks; `y` itself
        where the sublayer is not cut."""
        return y if self.tensor is None else self._summed(at, y, site, self.tensor)

    def whole_logits(self, at: Here, part: Tensor, rows: RowMap) -> Tensor:
        """Logits [rows, V] from those [rows, n] of this rank's part of the vocabulary."""
        if self.tensor is None:
            return part
        sizes = tuple(b - a for a, b in cut(self.shares.config.vocab, self.tensor.size))
        gathered = {"group": self.tensor, "axis": 1, "sizes": sizes}
        return at("comm.all_gather", part, site="logits", row_map=rows, **gathered)

    def numbers_of(self, active: Tensor) -> Tensor:
        """Where the experts `active` lie in this rank's stacks."""
        return active if self._number is None else self._number[active]

    def exchanges(self) -> bool:
        """Whether each rank routes its share of the rows, and pairs travel to the ranks of their experts."""
        return self.placement is not None and self.layout.dispatch == "all_to_all"

    def routed(self, step: Step, at: Here, x: Tensor, p: Moe) -> Tensor:
        """The routed part [rows, D] of a sublayer whose experts lie on several ranks, of this rank's rows where they
        are laid over ranks; `x` [rows, D] are then its own, too, where pairs are exchanged."""
        if self.exchanges():
            return experts.exchanged(step, at, x, p, group=self.expert, placement=self.placement)
        y = experts.owned(step, at, x, p, rank=self.rank, placement=self.placement)
        return layers.routed_output(step, step.on_own_rows(at), p, self._summed(at, y, "routed", self.expert))

    def _summed(self, at: Here, y: Tensor, site: str, group: Group) -> Tensor:
        """The sum over `group` of the parts `y` [rows, D]; a fused all-reduce covers the gather and gets the group."""
        if self.spread is not None:
            return self.spread.summed(at, y, site)
        if "comm.all_gather" in at.caller.covers("comm.all_reduce"):
            return at("comm.all_reduce", y, site=site, group=group)
        sizes = (1,) * group.size
        parts = at("comm.all_gather", y.unsqueeze(1), site=site, group=group, axis=1, sizes=sizes)
        return at("comm.all_reduce", parts, site=site)
