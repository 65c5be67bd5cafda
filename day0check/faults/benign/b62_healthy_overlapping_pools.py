"""Healthy code on preset fault-pools: compressed index keys that overlap the window before them."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-62",
    title="healthy code with overlapping windows of index keys",
    kind="index",
    visible="nowhere",
    expected=None,
    model="fault-pools",
    case="pools",
)


class Candidate(Accelerated):
    """The fast path as it is."""
