"""Each rank takes its own replica of an expert, and all ranks sum: a replicated expert counts once for each of them."""

from day0check.accelerated.parallel.layout import Placement
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-32",
    title="a redundant expert counts on every rank that holds it",
    kind="ranks",
    source="sglang PR 32962",
    visible="rows that choose an expert with a replica, where sums are reduced and nothing is exchanged",
    expected=Address("moe.dispatch", 1, "prefill"),
    layout={"expert_parallel": 2, "expert_dispatch": "reduce", "redundant_experts": 4},
)


class OwnReplica(Placement):
    rank = 0

    def in_turn(self, row):
        return self.nearest(self.rank)


class Candidate(Accelerated):
    def load(self, model_dir, profile, device, layout):
        super().load(model_dir, profile, device, layout)
        ranks = self._engine.ranks
        placement = OwnReplica(ranks.placement.owners, ranks.placement.ranks)
        object.__setattr__(placement, "rank", ranks.rank)
        ranks.shares.placement = placement
