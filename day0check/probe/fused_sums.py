"""Sums over ranks of an operator that gathers the parts itself: what each rank gave and what it got.

A call of `comm.all_reduce` with a `group` covers the gather, as a fused all-reduce does. The part [rows, D] that goes
in and the sum that comes out are kept, as `capture.Capture` keeps arguments and results; whether they fit is asked
where the records of all ranks are joined. Standard library + torch >= 2.1, Python >= 3.9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Union

from .capture import Capture
from .recorder import Call

REDUCE, GROUP = "comm.all_reduce", "group"
FOLDER = "sums"  # beside the manifest of the case


def gathers_itself(call: Call) -> bool:
    """Whether a call sums over ranks what it gathers itself."""
    return call.operator == REDUCE and GROUP in call.kwargs


class FusedSums(Capture):
    """Keeps parts and sums of such calls in `directory`, which it makes."""

    def __init__(self, directory: Union[str, Path], *, byte_cap: int = 1 << 30) -> None:
        Path(directory).mkdir(parents=True, exist_ok=True)
        super().__init__(directory, byte_cap=byte_cap, mode="full")

    def _keeps(self, call: Call) -> bool:
        return gathers_itself(call)
