"""Healthy code: a prompt of one repeated token."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-30",
    title="a prompt of one repeated token",
    kind="attention",
    visible="nowhere",
    expected=None,
    case="repeated",
)


class Candidate(Accelerated):
    """The fast path as it is."""
