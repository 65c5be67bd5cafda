"""Execution numbers that are the same on all ranks at each exchange, whatever a rank without rows has skipped."""

from __future__ import annotations

from day0check.probe.recorder import Recorder

STAGE = 16  # execution numbers of one stage: more than it has calls


class Pace:
    """Lets every rank's execution numbers go on from the same one at each stage: a rank without rows skips calls."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._next = recorder, recorder.order

    def stage(self) -> None:
        self._next += STAGE
        self._recorder.order = max(self._recorder.order, self._next)
