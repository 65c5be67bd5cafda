"""Healthy code on preset fault-vl: rotary positions with three axes, images in rows."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-61",
    title="healthy code with positions of three axes",
    kind="vision",
    visible="nowhere",
    expected=None,
    model="fault-vl",
    case="two_images",
)


class Candidate(Accelerated):
    """The fast path as it is."""
