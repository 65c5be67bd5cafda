"""Block scales of an expert are cut by half of its columns, rounded down, and the codes by whole blocks."""

from day0check.accelerated.parallel.shard import GROUP, Cut, ShardReader
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-24",
    title="scales of a block on a rank's edge do not belong to its codes",
    kind="ranks",
    source="sglang PR 9473",
    visible="experts whose width has a number of scale blocks that the ranks do not divide",
    expected=Address("moe.convert", 1, "prefill"),
    model="fault-ranks",
    layout={"tensor_parallel": 2},
    differs="the codes are cut by whole blocks, so that only the scales are those of another one",
)


class FlooredScales(ShardReader):
    def piece(self, name, where):
        if name.endswith("w2.weight_scale"):
            shares = self.shares
            even = shares.config.moe.width // shares.layout.tensor * shares.rank // GROUP
            where = Cut(1, even, even + where.stop - where.start)
        return super().piece(name, where)


class Candidate(Accelerated):
    def ranks(self, layout):
        ranks = super().ranks(layout)
        ranks.reader = FlooredScales
        return ranks
