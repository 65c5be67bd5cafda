"""The packed matrix [Q | K | V | Z | beta | alpha] is cut evenly over ranks, each takes its parts out of that."""

from safetensors import safe_open

from day0check.accelerated.parallel.shard import ShardReader
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-54",
    title="a packed projection is cut evenly and not part by part",
    kind="ranks",
    source="Megatron-LM PR 1989",
    visible="more than one rank",
    expected=Address("kda.project", 0, "prefill"),
    model="fault-packed",
    layout={"tensor_parallel": 2},
)


class CutEvenly(ShardReader):
    def piece(self, name, where):
        entry = self.checkpoint.entry(name)
        if entry.rows is None:
            return super().piece(name, where)
        with safe_open(str(entry.file), framework="pt") as opened:
            matrix = opened.get_tensor(entry.stored)
        rows = len(matrix) // self.shares.layout.tensor
        own = matrix[self.shares.rank * rows : (self.shares.rank + 1) * rows]
        begin = entry.rows.start // self.shares.layout.tensor
        return own[begin : begin + where.stop - where.start].clone()


class Candidate(Accelerated):
    def ranks(self, layout):
        ranks = super().ranks(layout)
        ranks.reader = CutEvenly
        return ranks
