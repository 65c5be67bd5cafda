"""Healthy code: latent rows kept as plain FP8 codes at the calibrated scale of the checkpoint."""

from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Entry

ENTRY = Entry(
    id="B-74",
    title="a cache of plain FP8 codes at calibrated scales",
    kind="cache",
    visible="nowhere",
    expected=None,
    model="fault-cache",
    profile="fp8-cache",
)


class Candidate(Accelerated):
    """The fast path as it is."""
