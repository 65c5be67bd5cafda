"""A matrix that holds the two gates of each head side by side is split at its middle, as if one followed the other."""

from safetensors import safe_open

from day0check.accelerated.parallel.shard import ShardReader
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-53",
    title="interleaved gates are cut as if they followed each other",
    kind="ranks",
    source="vllm PR 36242",
    visible="more than one rank",
    expected=Address("kda.project", 0, "prefill"),
    model="fault-interleaved",
    layout={"tensor_parallel": 2},
)


class SplitAtTheMiddle(ShardReader):
    def piece(self, name, where):
        entry = self.checkpoint.entry(name)
        if not name.endswith(("b_proj.weight", "a_proj.weight")) or entry.rows is None:
            return super().piece(name, where)
        with safe_open(str(entry.file), framework="pt") as opened:
            matrix = opened.get_tensor(entry.stored)
        half = matrix[: len(matrix) // 2] if name.endswith("b_proj.weight") else matrix[len(matrix) // 2 :]
        return half[where.start : where.stop].clone()


class Candidate(Accelerated):
    def ranks(self, layout):
        ranks = super().ranks(layout)
        ranks.reader = SplitAtTheMiddle
        return ranks
