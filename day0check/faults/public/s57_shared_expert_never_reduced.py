"""The shared expert's part of a rank is taken for its sum over ranks."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-57",
    title="the shared expert is never reduced",
    kind="ranks",
    source="tpu-inference PR 3435",
    visible="more than one rank, the more the worse",
    expected=Address("comm.all_reduce", 1, "prefill"),
    layout={"tensor_parallel": 2},
    differs="every rank goes on with its own part, not all with that of rank 0",
)


class Candidate(Accelerated):
    def load(self, model_dir, profile, device, layout):
        super().load(model_dir, profile, device, layout)
        ranks = self._engine.ranks
        summed = ranks.reduced
        ranks.reduced = lambda at, y, site: y if site == "shared" else summed(at, y, site)
