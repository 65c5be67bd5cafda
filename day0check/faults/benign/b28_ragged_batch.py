"""Healthy code: a batch of requests of different length."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-28",
    title="a batch of requests of different length",
    kind="phases",
    visible="nowhere",
    expected=None,
    case="batch",
)


class Candidate(Accelerated):
    """The fast path as it is."""
