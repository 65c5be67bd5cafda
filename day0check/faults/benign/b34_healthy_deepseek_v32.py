"""Healthy code on preset tiny-deepseek-v3.2."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-34",
    title="healthy code on tiny-deepseek-v3.2",
    kind="index",
    visible="nowhere",
    expected=None,
    model="tiny-deepseek-v3.2",
    case="short",
)


class Candidate(Accelerated):
    """The fast path as it is."""
