"""Healthy code: a request that waited in the host tier."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-73",
    title="pages and states go to the host tier and come back",
    kind="memory",
    visible="nowhere",
    expected=None,
    case="offload",
)


class Candidate(Accelerated):
    """The fast path as it is."""
