"""Healthy code: requests that begin behind a prefix of the cache."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-71",
    title="a legal hit of the prefix cache: pages shared, states restored",
    kind="memory",
    visible="nowhere",
    expected=None,
    case="prefix",
)


class Candidate(Accelerated):
    """The fast path as it is."""
