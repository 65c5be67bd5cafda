"""The engine as it is over a sweep of lengths and batches: blocks of fixed size, tables made once, lookups."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-84",
    title="blocked operators whose memory stops growing",
    kind="memory",
    visible="memory, work and time over length and batch",
    expected=None,
    case="cost",
)


class Candidate(Accelerated):
    """The fast path as it is."""
