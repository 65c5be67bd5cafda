"""Healthy code: states of linear attention are kept in bfloat16, under the profile that says so."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-75",
    title="states in bfloat16 under a profile that claims it",
    kind="linear-attention",
    visible="nowhere",
    expected=None,
    profile="bf16-states",
)


class Candidate(Accelerated):
    """The fast path as it is."""
