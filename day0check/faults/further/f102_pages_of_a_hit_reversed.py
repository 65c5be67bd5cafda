"""A request that begins behind a known prefix holds its pages in the wrong order."""

from day0check.accelerated.cache import Tenancy
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-102",
    title="the pages of a prefix hit are taken in reversed order",
    kind="cache",
    visible="after a hit of two or more pages",
    expected=Address("index.gather", 3, "prefill", request="b"),
    case="prefix",
)


class Candidate(Accelerated):
    def run(self, requests, schedule, recorder):
        plain = Tenancy.adopt
        Tenancy.adopt = lambda tenancy, pages: plain(tenancy, pages[::-1])
        try:
            return super().run(requests, schedule, recorder)
        finally:
            Tenancy.adopt = plain
