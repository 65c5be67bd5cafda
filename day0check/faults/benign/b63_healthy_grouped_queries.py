"""Healthy code on preset fault-gqa: query heads that share key heads, a norm for each head."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-63",
    title="healthy code with grouped queries",
    kind="attention",
    visible="nowhere",
    expected=None,
    model="fault-gqa",
)


class Candidate(Accelerated):
    """The fast path as it is."""
