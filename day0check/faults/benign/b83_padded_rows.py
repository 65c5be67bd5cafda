"""Decode steps of a fixed number of rows: padding rows hold what earlier steps left, and reach nobody."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-83",
    title="decode steps are padded to four rows",
    kind="phases",
    visible="decode steps with fewer requests than rows",
    expected=None,
    case="padded",
)


class Candidate(Accelerated):
    """The fast path as it is."""
