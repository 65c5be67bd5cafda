"""The shared expert's rows are given to their ranks without a sum: each goes on with its own part of its rows."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-153",
    title="the shared expert is scattered and never summed",
    kind="ranks",
    visible="prompts of at least as many rows as there are ranks",
    expected=Address("comm.reduce_scatter", 1, "prefill"),
    layout={"tensor_parallel": 2, "sums": "reduce_scatter"},
)


class Candidate(Accelerated):
    def load(self, model_dir, profile, device, layout):
        super().load(model_dir, profile, device, layout)
        ranks = self._engine.ranks
        summed = ranks.reduced

        def reduced(at, y, site):
            return y[ranks.spread.mine] if site == "shared" and ranks.spread is not None else summed(at, y, site)

        ranks.reduced = reduced
