"""Healthy code on preset fault-packed: the projections of linear attention are stored in one matrix."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-64",
    title="healthy code on packed projections of linear attention",
    kind="linear-attention",
    visible="nowhere",
    expected=None,
    model="fault-packed",
)


class Candidate(Accelerated):
    """The fast path as it is."""
