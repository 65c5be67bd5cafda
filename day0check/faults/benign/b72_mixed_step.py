"""Healthy code: decode rows in one step with the rows of a prompt."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-72",
    title="single tokens ride along in steps of prompts",
    kind="phases",
    visible="nowhere",
    expected=None,
    case="mixed",
)


class Candidate(Accelerated):
    """The fast path as it is."""
