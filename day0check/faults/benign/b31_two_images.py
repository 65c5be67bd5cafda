"""Healthy code: two images in one turn."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-31",
    title="two images in one turn",
    kind="vision",
    visible="nowhere",
    expected=None,
    case="two_images",
)


class Candidate(Accelerated):
    """The fast path as it is."""
