"""Healthy code: latents and index keys are kept as E4M3 codes with scales, under the profile that says so."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-24",
    title="an FP8 cache under a profile that claims it",
    kind="cache",
    visible="nowhere",
    expected=None,
    profile="fp8-cache",
)


class Candidate(Accelerated):
    """The fast path as it is."""
