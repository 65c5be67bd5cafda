"""Each rank takes its embeddings as if the rows of a step always came out even: behind the first rank they are those of
the row before, while every sum is scattered to the right rows."""

import contextlib

from day0check.accelerated.parallel.spread import Spread
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-152",
    title="embeddings of a rank are those of an even share of the rows",
    kind="ranks",
    visible="prompts whose rows are no multiple of the ranks",
    expected=Address("residual.mix", 0, "prefill"),
    layout={"tensor_parallel": 3, "expert_parallel": 3, "sums": "reduce_scatter"},
)


class EvenShare(Spread):
    @property
    def mine(self):
        each, rank = sum(self.sizes) // self.group.size, self.group.rank
        return slice(rank * each, rank * each + self.sizes[rank])


class Candidate(Accelerated):
    def load(self, model_dir, profile, device, layout):
        super().load(model_dir, profile, device, layout)
        ranks = self._engine.ranks
        laid = ranks.laid

        @contextlib.contextmanager
        def other(rows, count):
            with laid(rows, count) as spread:
                if spread is not None:
                    ranks.spread = EvenShare(spread.group, spread.shares, spread.rows)
                yield ranks.spread

        ranks.laid = other
