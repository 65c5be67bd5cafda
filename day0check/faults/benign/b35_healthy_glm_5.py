"""Healthy code on preset tiny-glm-5."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-35",
    title="healthy code on tiny-glm-5",
    kind="index",
    visible="nowhere",
    expected=None,
    model="tiny-glm-5",
    case="short",
)


class Candidate(Accelerated):
    """The fast path as it is."""
