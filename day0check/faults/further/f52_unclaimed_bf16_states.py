"""States of linear attention are kept in bfloat16 between calls, and the profile says float32."""

from day0check.accelerated.records import Formats
from day0check.backends.accelerated import Accelerated
from day0check.faults.entry import Address, Entry

ENTRY = Entry(
    id="F-52",
    title="states in bfloat16 under a profile that does not claim it",
    kind="linear-attention",
    visible="everywhere",
    expected=Address("state.store", 0, "prefill"),
)


class Candidate(Accelerated):
    formats = Formats(state="bfloat16")
