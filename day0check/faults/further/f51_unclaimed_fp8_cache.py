"""The cache is quantised to E4M3, and the profile says bfloat16."""

from day0check.accelerated.records import Formats
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-51",
    title="an FP8 cache under a profile that does not claim it",
    kind="cache",
    visible="everywhere",
    expected=Address("quantise.rows", 0, "prefill"),
    model="tiny-deepseek-v3.2",
)


class Candidate(Accelerated):
    formats = Formats(kv="fp8", index="fp8")
