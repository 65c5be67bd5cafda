"""The shared expert reduces its own sum, and whoever runs the experts reduces it again: it counts once a rank."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="S-56",
    title="the shared expert is reduced twice",
    kind="ranks",
    source="vllm PR 49366",
    visible="more than one rank, the more the worse",
    expected=Address("comm.all_reduce", 1, "prefill"),
    layout={"tensor_parallel": 2},
)


class Candidate(Accelerated):
    def load(self, model_dir, profile, device, layout):
        super().load(model_dir, profile, device, layout)
        ranks = self._engine.ranks
        once = ranks.reduced

        def reduced(at, y, site):
            y = once(at, y, site)
            return once(at, y, site) if site == "shared" else y

        ranks.reduced = reduced
