"""Forty layers: noise compounds, and nothing is wrong."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-18",
    title="healthy code of forty layers",
    kind="residual",
    visible="nowhere: hidden states of great depth are less alike",
    expected=None,
    model="fault-deep",
)


class Candidate(Accelerated):
    """The fast path as it is."""
