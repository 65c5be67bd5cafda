"""Healthy code: chunked prefill over small pages."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-27",
    title="chunked prefill over small pages",
    kind="phases",
    visible="nowhere",
    expected=None,
    case="chunks",
)


class Candidate(Accelerated):
    """The fast path as it is."""
