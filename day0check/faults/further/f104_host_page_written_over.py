"""Host memory of a request that is away is used for something else."""

from day0check.accelerated.host_tier import HostTier
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-104",
    title="a page of the host tier is written over while its request is away",
    kind="cache",
    visible="when the request comes back",
    expected=Address("kv.offload", 3, "decode", request="a", position=0),
    case="offload",
)


class Candidate(Accelerated):
    def run(self, requests, schedule, recorder):
        plain = HostTier.fetch

        def fetch(tier, caller, running, **kwargs):
            tier._host["kv", 3][running.parked.pages[0], 0] += 1
            plain(tier, caller, running, **kwargs)

        HostTier.fetch = fetch
        try:
            return super().run(requests, schedule, recorder)
        finally:
            HostTier.fetch = plain
