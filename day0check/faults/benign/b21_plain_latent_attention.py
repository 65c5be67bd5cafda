"""Latent attention on keys and values expanded from the latents, where the fast path absorbs them into the queries."""

from day0check.backends.reference import Reference
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-21",
    title="plain in place of absorbed latent attention",
    kind="attention",
    visible="last bits",
    expected=None,
)


class Candidate(Reference):
    """The reference's own plain form, its operators rounded at the points of the profile."""
