"""Healthy code on preset tiny-kimi-linear."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-37",
    title="healthy code on tiny-kimi-linear",
    kind="linear-attention",
    visible="nowhere",
    expected=None,
    model="tiny-kimi-linear",
    case="short",
)


class Candidate(Accelerated):
    """The fast path as it is."""
