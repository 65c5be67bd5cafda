"""Healthy code: a preempted request, computed again."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-29",
    title="a preempted request, computed again",
    kind="memory",
    visible="nowhere",
    expected=None,
    case="preempt",
)


class Candidate(Accelerated):
    """The fast path as it is."""
