"""More ranks than key heads: the projections of a key head are on several ranks, its norm is cut by rank alone."""

from day0check.accelerated.parallel.shard import Cut, ShardReader
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-55",
    title="the norm of the keys is sliced by rank and not by head",
    kind="ranks",
    source="sglang PR 20967",
    visible="more ranks than key heads",
    expected=Address("norm.rms", 1, "prefill"),
    model="fault-gqa",
    layout={"tensor_parallel": 4, "expert_parallel": 4},
    differs="half a head would not fit: a whole one is taken, at the place where that of the rank would begin",
)


class ByRank(ShardReader):
    def piece(self, name, where):
        if name.endswith("k_norm.weight"):
            g, shares = self.shares.config.gqa, self.shares
            begin = min(g.kv_heads * g.dim // shares.layout.tensor * shares.rank, (g.kv_heads - 1) * g.dim)
            where = Cut(0, begin, begin + g.dim)
        return super().piece(name, where)


class Candidate(Accelerated):
    def ranks(self, layout):
        ranks = super().ranks(layout)
        ranks.reader = ByRank
        return ranks
